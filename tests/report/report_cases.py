"""What the reports of these tests are made of, and how a page is read back."""

from html.parser import HTMLParser

from plot.plot_records import right

from evictbench.store import run_folder

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> & \"q\" 'q'"
"""What must never be HTML."""


def word_tokenizer(folder, words):
    """A tokenizer.json of whole words, so that prompts are what a test says."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


WORDS = ["[unk]", "the", "needle", "is", "seven", "what", "?", HOSTILE.replace(" ", "\N{NO-BREAK SPACE}"), "hay"]


def prompt(doc_id):
    """A prompt of its own for each document: context up to the hay, and a question."""
    ids = [1, 2, 3, 4, 7, *([8] * (doc_id + 1)), 5, 6]
    return {
        "prompt_ids": run_folder.pack_ids(ids),
        "prompt_hash": run_folder.hash_ids(ids),
        "prompt_tokens": len(ids),
        "border": len(ids) - 2,
    }


def answers(count, of=10, **changes):
    return [line | prompt(line["doc_id"]) for line in right(count, of, **changes)]


class Page(HTMLParser):
    """The elements of a page, and whether each end has its beginning."""

    VOID = frozenset({"meta", "link", "input", "br", "wbr", "img"})

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        while self.open and self.open[-1] in ("option", "li", "dt", "dd", "p") and self.open[-1] != tag:
            self.open.pop()
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)
