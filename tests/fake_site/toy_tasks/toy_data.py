"""Documents of the toy suite: a few words to be told back."""

import datasets


def _docs(samples, seed, words):
    docs = []
    for index in range(samples):
        wanted = [f"word{(seed + index * words + k) % 97}" for k in range(words)]
        context = "Remember this. " + " ".join(wanted) + " Blue birds sing." * (1 + index % 3)
        docs.append(
            {
                "index": index,
                "context": context,
                "input": f"{context}\nWhat was to be remembered?",
                "outputs": wanted,
                "gen_prefix": "It was",
            }
        )
    return {"test": datasets.Dataset.from_list(docs)}


def recall(samples=4, seed=0, **_):
    return _docs(samples, seed, words=1)


def pairs(samples=4, seed=0, **_):
    return _docs(samples, seed, words=2)


def score(doc, results):
    found = [word in results[0].split() for word in doc["outputs"]]
    return {"score": sum(found) / len(found)}
