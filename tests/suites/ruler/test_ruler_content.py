"""What each task hides: answers that are there exactly as often as they should be, and nowhere twice."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import accumulate, pairwise

import pytest

from evictbench.errors import UserError
from evictbench.suites.ruler import wordlists
from evictbench.suites.ruler.niah import DEPTHS
from evictbench.suites.ruler.seeds import draws
from evictbench.suites.ruler.tasks import NOISE, TASKS, Needles

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (.+?) is: (\S+)\.(?=\s|$)")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NIAH = [name for name, task in TASKS.items() if isinstance(task.settings, Needles)]


def haystack(doc: dict) -> str:
    """The context without its instruction line."""
    return doc["context"].split("\n", 1)[1].removesuffix("\n")


@pytest.mark.parametrize("name", NIAH)
def test_needles_are_distinct_and_answers_stand_once(documents, name):
    settings = TASKS[name].settings
    value = UUID if settings.value == "uuids" else r"[1-9]\d{6}"
    for doc in documents(name, context=2048, limit=8):
        found = NEEDLE.findall(doc["context"])
        pairs = [(key, hidden) for _, key, hidden in found]
        assert {kind for kind, _, _ in found} == {settings.value}
        assert all(re.fullmatch(value, hidden) for _, hidden in pairs)
        assert len({hidden for _, hidden in pairs}) == len(pairs)
        assert len({key for key, _ in pairs}) * settings.values == len(pairs) or settings.haystack == "needles"
        if settings.haystack != "needles":
            assert len(pairs) == settings.keys * settings.values
        for answer in doc["outputs"]:
            assert doc["input"].count(answer) == 1
            assert answer not in doc["gen_prefix"]

        question = doc["input"][len(doc["context"]) :]
        asked = re.search(r" for (.+) mentioned in the provided text\?$", question)[1]
        keys = re.split(r", and |, ", asked) if settings.queries > 1 else [asked]
        assert len(keys) == settings.queries == len(set(keys))
        assert sorted(hidden for k, hidden in pairs if k in keys) == sorted(doc["outputs"])
        assert doc["gen_prefix"].endswith(f" for {asked} mentioned in the provided text " + question_verb(doc))
        assert len(doc["outputs"]) == settings.queries * settings.values


def question_verb(doc: dict) -> str:
    return "is" if len(doc["outputs"]) == 1 else "are"


def test_keys_are_distinct_in_a_haystack_of_needles(documents):
    for name in ("niah_multikey_2", "niah_multikey_3"):
        for doc in documents(name, context=4096, limit=4):
            lines = haystack(doc).split("\n")
            keys = [NEEDLE.fullmatch(line)[2] for line in lines]
            assert len(set(keys)) == len(keys) > 20


def test_one_needle_is_asked_for_in_the_singular_and_several_in_the_plural(documents):
    one = documents("niah_single_3")[0]
    assert one["context"].startswith(
        "A special magic uuid is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the uuid afterwards.\n"
    )
    many = documents("niah_multivalue")[0]
    assert many["context"].startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.\n"
    )


def test_noise_is_whole_lines_and_every_place_is_equally_likely(documents):
    depths = []
    for doc in documents("niah_single_1", context=1024, limit=400):
        lines = haystack(doc).split("\n")
        [place] = [i for i, line in enumerate(lines) if line != NOISE]
        depths.append(place / (len(lines) - 1))
    fifths = Counter(min(4, int(5 * depth)) for depth in depths)
    # 400 draws in five parts: 80 each, standard deviation 8
    assert all(80 - 4 * 8 < fifths[i] < 80 + 4 * 8 for i in range(5)), fifths


def test_essay_needles_stand_at_the_forty_depths(documents, prepare):
    assert len(DEPTHS) == 40
    assert (DEPTHS[0], DEPTHS[1], DEPTHS[-1]) == (0, 3, 100)
    essay = prepare("niah_single_2").metadata["ruler_samples"]["niah_single_2"]._maker.essay
    ends = [0, *(end - 1 for end in accumulate(len(sentence) + 1 for sentence in essay.sentences(500)))]
    depths = []
    for doc in documents("niah_single_2", context=2048, limit=300):
        before, after = (part.strip() for part in NEEDLE.sub("\0", haystack(doc)).split("\0"))
        joined = " ".join(part for part in (before, after) if part)
        total, place = ends.index(len(joined)), ends.index(len(before))
        assert joined == " ".join(essay.sentences(total))
        assert place in {total * depth // 100 for depth in DEPTHS}
        depths.append(place / total)
    thirds = Counter(min(2, int(3 * depth)) for depth in depths)
    assert all(100 - 4 * 8.2 < thirds[i] < 100 + 4 * 8.2 for i in range(3)), thirds
    assert min(depths) == 0
    assert max(depths) == 1


def test_several_essay_needles_do_not_share_a_depth(documents):
    for doc in documents("niah_multikey_1", context=4096, limit=10):
        assert len(re.findall(r"is: \d{7}\. One of the special", doc["context"])) == 0


def test_variables_form_one_chain_after_a_worked_example(documents, tokenizer):
    for doc in documents("vt", context=2048, limit=8):
        example, text = doc["context"].split("\n\nMemorize", 1)
        assert len(tokenizer(example)["input_ids"]) < 540
        value = re.search(r"assigned the value (\d{5}) in", doc["input"][len(doc["context"]) :])[1]
        lines = [line for line in text.split("\n") if line.startswith("VAR")]
        names = [re.match(r"VAR ([A-Z]{5}) = ", line)[1] for line in lines]
        assert names == doc["outputs"]
        assert len(set(names)) == 5
        assert lines[0] == f"VAR {names[0]} = {value}"
        assert lines[1:] == [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
        assert set(text.split("\n")[2:-1]) == {NOISE, *lines}
        assert doc["gen_prefix"].endswith(f"5 variables are assigned the value {value}, they are:")

        shown = re.search(r"5 variables are assigned the value (\d{5}), they are: ([A-Z ]+)$", example)
        assert shown[1] != value
        assert re.findall(r"VAR ([A-Z]{3}) =", example) == shown[2].split()
        assert not any(name in example for name in names)


def test_the_examples_differ_between_samples(documents):
    for name in ("vt", "cwe"):
        starts = {doc["context"][:300] for doc in documents(name, context=2048)}
        assert len(starts) == 6


@pytest.mark.parametrize(("context", "often", "seldom", "shown"), [(2048, 6, 1, (3, 1)), (4096, 30, 3, (10, 3))])
def test_common_words_are_counted_as_upstream_counts_them(documents, context, often, seldom, shown):
    for doc in documents("cwe", context=context, limit=4):
        example, words = re.split(r"\nBelow is a numbered list", doc["context"])
        counts = Counter(listed(words))
        assert {word for word, n in counts.items() if n == often} == set(doc["outputs"])
        assert len(doc["outputs"]) == 10
        assert {n for word, n in counts.items() if word not in doc["outputs"]} == {seldom}

        text, answer = example.split(" Answer: The top 10 words that appear most often in the list are: ")
        in_example = Counter(listed(text.split("\nQuestion:")[0]))
        assert {word for word, n in in_example.items() if n == shown[0]} == set(listed(answer))
        assert set(in_example.values()) == set(shown)
        assert len(in_example) == (20 if context < 4096 else 40)
        assert not set(in_example) & set(counts)


def listed(text: str) -> list[str]:
    items = re.findall(r"(\d+)\. (.+?)(?= \d+\. |\n|$)", text)
    assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
    return [word for _, word in items]


def test_no_common_word_stands_in_another_word(documents):
    for doc in documents("cwe", context=4096, limit=4):
        others = {word.lower() for word in wordlists.single()}
        for answer in doc["outputs"]:
            assert not [word for word in others if answer.lower() in word and word != answer.lower()]


def test_a_list_longer_than_the_single_words_has_no_word_twice(prepare):
    maker = prepare("cwe", context=131_072).metadata["ruler_samples"]["cwe"]._maker
    prompt = maker.draft(0, draws("cwe", 0, 0)).render(9_000)
    counts = Counter(listed(re.split(r"\nBelow is a numbered list", prompt.context)[1]))
    assert len(counts) == 9_000 > len(wordlists.single())
    assert set(counts.values()) == {30, 3}
    assert len({word.lower() for word in counts}) == len(counts)
    assert not [word for word in counts for answer in prompt.outputs if answer in word and word != answer]


@pytest.mark.parametrize("context", [512, 2048, 16_384])
def test_frequent_words_have_zipf_counts_and_clear_answers(documents, context):
    for doc in documents("fwe", context=context, limit=4):
        text = doc["context"].split("Find the three most frequently appeared coded words. ")[1]
        counts = Counter(text.split()).most_common()
        assert counts[0][0] == "..."
        assert [word for word, _ in counts[1:4]] == doc["outputs"]
        assert counts[1][1] > counts[2][1] > counts[3][1] > counts[4][1]
        assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in counts[1:])
        noise = counts[0][1]
        for rank, (_, count) in enumerate(counts[:6], start=1):
            assert abs(count - noise / rank**2) <= 1 + 1 / rank**2
        assert len(counts) <= context // 50


def test_frequent_words_are_clear_at_the_least_length(documents):
    with pytest.raises(UserError) as error:
        documents("fwe", context=60)
    least = int(str(error.value).split("at least ")[1].split()[0])
    for doc in documents("fwe", context=least, limit=10):
        text = doc["context"].split("coded words. ")[1]
        counts = [n for _, n in Counter(text.split()).most_common()]
        assert counts[1] > counts[2] > counts[3] > counts[4]


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_questions_come_in_order_with_their_documents(documents, data_dir, name):
    docs = documents(name, context=2048, limit=8)
    if name == "qa_1":
        articles = json.loads((data_dir / "squad" / "invented.json").read_text())["data"]
        paragraphs = [p for article in articles for p in article["paragraphs"]]
        expected = [(p["qas"][0]["question"], [a["text"] for a in p["qas"][0]["answers"]]) for p in paragraphs]
    else:
        records = json.loads((data_dir / "ruler" / "hotpotqa" / "invented.json").read_text())
        expected = [(record["question"], [record["answer"]]) for record in records]
    for doc, (question, answers) in zip(docs, expected, strict=False):
        assert doc["input"].endswith(f"\n\nQuestion: {question}")
        assert doc["outputs"] == answers
        assert answers[0] in doc["context"]
        numbers = [int(n) for n in re.findall(r"^Document (\d+):$", doc["context"], re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1))
        texts = re.split(r"\n?\n?Document \d+:\n", doc["context"])[1:]
        assert len(set(texts)) == len(texts)
    places = [number_of(doc["context"], doc["outputs"][0]) for doc in docs]
    assert len(set(places)) > 2


def number_of(context: str, answer: str) -> int:
    return len(re.findall(r"^Document \d+:$", context[: context.index(answer)], re.MULTILINE))


def test_documents_of_the_same_article_come_before_others(documents):
    for doc in documents("qa_1", context=1024, limit=5):
        articles = Counter(re.findall(r"The code of article (\d+), part", doc["context"]))
        own = re.search(r"article (\d+), part \d\?$", doc["input"])[1]
        assert articles[own] == 6 or set(articles) == {own}


def test_real_question_files(prepare, shared):
    suite = prepare("qa_1", "qa_2", context=4096, limit=120, data_dir=shared / "data")
    assert suite.data["squad"].startswith("xquad.en.json (1190 questions, 240 documents) sha256:")
    assert suite.data["hotpotqa"].startswith("hotpot_dev_distractor_100.json (100 questions, ")
    samples = suite.metadata["ruler_samples"]
    assert len(samples["qa_1"]) == 120
    assert 90 <= len(samples["qa_2"]) <= 100
    for name in ("qa_1", "qa_2"):
        filled = [doc["prompt_tokens"] + 32 for doc in samples[name]]
        assert max(filled) <= 4096
        assert sum(filled) / len(filled) > 0.95 * 4096
    assert all(any(answer in doc["context"] for answer in doc["outputs"]) for doc in samples["qa_1"])


def test_niah_multikey_3_has_the_structure_of_upstreams_file(documents, shared):
    path = shared / "data" / "ruler" / "reference" / "niah_multikey_3.4096.first20.jsonl"
    theirs = [json.loads(line) for line in path.read_text().splitlines()]
    ours = documents("niah_multikey_3", context=4096, limit=20)

    def shape(text: str) -> list[str]:
        return [re.sub(UUID, "<uuid>", line) for line in text.split("\n")]

    for their, our in zip(theirs, ours, strict=True):
        mine = shape(f"{our['input']} {our['gen_prefix']}")
        upstream = shape(their["input"])
        assert set(mine) == set(upstream)
        assert (mine[0], mine[-1]) == (upstream[0], upstream[-1])
        assert len(their["outputs"]) == len(our["outputs"]) == 1
        assert their["input"].count(their["outputs"][0]) == our["input"].count(our["outputs"][0]) == 1
