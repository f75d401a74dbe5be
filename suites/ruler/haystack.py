"""The essay haystack: sentences of a given text, of the hub's essays, or of prose that the project makes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

from evictbench.errors import UserError, first_line

from . import prose
from .fit import Meter

HUB = Path("hub")  # `--haystack hub` asks for them

_SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]* (?=["'“‘(\[]?[A-Z0-9])""")
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|No|vs|etc|e\.g|i\.e|cf)|\b[A-Z])\.$")
_LONGEST = 80  # words; longer sentences are cut, so that a text without full stops can be used too
_BLOCK = 512  # sentences counted at a time


class Essay:
    """A text without end, as sentences: a given text begins again when it has run out.

    name: what the text is, with its hash, for the result.
    """

    def __init__(self, name: str, source: Iterator[str], meter: Meter, text: str = ""):
        self.name = name
        self._source = source
        self._meter = meter
        self._text = text
        self._sentences: list[str] = []
        self._tokens: list[int] = [0]  # of the first n sentences, each with the space before it

    def sentences(self, number: int) -> list[str]:
        """The first `number` sentences."""
        self._grow(number)
        return self._sentences[:number]

    def tokens(self, number: int) -> int:
        """About how many tokens the first `number` sentences take."""
        self._grow(number)
        return self._tokens[number]

    def within(self, tokens: int) -> int:
        """The number of sentences at which the text is at least that many tokens long."""
        while self._tokens[-1] < tokens:
            self._grow(len(self._sentences) + 1)
        return len(self._sentences)

    def __contains__(self, words: str) -> bool:
        """Whether the given text holds these words; the project's own prose holds no digits."""
        return words in self._text

    def _grow(self, number: int) -> None:
        while len(self._sentences) < number:
            block = list(islice(self._source, _BLOCK))
            self._sentences += block
            for count in self._meter.texts([f" {sentence}" for sentence in block]):
                self._tokens.append(self._tokens[-1] + count)


def own_prose(meter: Meter) -> Essay:
    """The project's prose (prose.py), the default."""
    return Essay(f"generated prose, version {prose.VERSION}", prose.sentences(), meter)


def from_path(path: Path, meter: Meter) -> Essay:
    """A text file, every *.txt of a folder in order of name, or the json file of essays that upstream's scripts make
    (an object with the field `text`). UserError where there is no text."""
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"The haystack folder {path} holds no *.txt file.")
    try:
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    except OSError as error:
        raise UserError(f"The haystack file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"The haystack {path} is not UTF-8 text.") from error
    if path.suffix == ".json":
        text = _text_of_json(path, text)
    return from_text(path.name, text, meter)


def _text_of_json(path: Path, content: str) -> str:
    try:
        loaded = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"The haystack {path} is not valid JSON: {first_line(error)}.") from error
    text = loaded.get("text") if isinstance(loaded, dict) else None
    if not isinstance(text, str):
        raise UserError(f"The haystack {path} is JSON and has no field text that holds the essays.")
    return text


def from_text(name: str, text: str, meter: Meter) -> Essay:
    """A given text; UserError where it holds no sentence."""
    sentences = split(text)
    if not sentences:
        raise UserError(f"The haystack {name} holds no text.")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Essay(f"{name} ({len(text)} characters) sha256:{digest}", cycle(sentences), meter, text)


def split(text: str) -> list[str]:
    """Sentences of a text, white space evened out; by rule, so that no model or download is needed."""
    text = re.sub(r"\s+", " ", text).strip()
    sentences: list[str] = []
    start = 0
    for end in _SENTENCE_END.finditer(text):
        sentence = text[start : end.end() - 1]
        if not _ABBREVIATION.search(sentence):
            sentences += _short(sentence)
            start = end.end()
    return sentences + _short(text[start:])


def _short(sentence: str) -> list[str]:
    words = sentence.split()
    return [" ".join(words[i : i + _LONGEST]) for i in range(0, len(words), _LONGEST)]
