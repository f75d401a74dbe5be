"""Essay-like English prose without end, the same on every machine: the haystack when no text is given.

A context-free grammar (prose.txt) walked with a seeded generator. No sentence occurs twice.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

VERSION = "1"  # a test pins the text's hash to it; raise it with any change to the text

Phrases = tuple[str, ...]
Words = dict[str, Phrases]

_SLOT = re.compile(r"\{(\w+)\}")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa])\(n\) (?=(\w))")
_DOUBLED = re.compile(r"\b(\w+|the [\w ]+?)(?:,| and| was| but)? \1\b", re.IGNORECASE)


def sentences() -> Iterator[str]:
    """Sentences of the prose in order; endless. A theme lasts a few paragraphs, then another begins."""
    grammar, themes = _grammar()
    rng = random.Random(f"evictbench prose {VERSION}")
    seen: set[str] = set()
    recent: deque[str] = deque(maxlen=6)
    theme = ""
    while True:
        theme = rng.choice([name for name in themes if name != theme])
        words = grammar | _theme_words(theme, themes[theme])
        for _ in range(rng.randint(3, 7)):
            shape = ["opening", *["body"] * rng.randint(3, 8)]
            if rng.random() < 0.4:
                shape.append("closing")
            for kind in shape:
                yield _fresh(kind, words, rng, seen, recent)


def _fresh(kind: str, words: Words, rng: random.Random, seen: set[str], recent: deque[str]) -> str:
    while True:
        phrase = rng.choice(words[kind])
        text = _expand(phrase, words, rng)
        if phrase not in recent and text not in seen and not _DOUBLED.search(text):
            seen.add(text)
            recent.append(phrase)
            return text


def _expand(phrase: str, words: Words, rng: random.Random) -> str:
    def fill(slot: re.Match[str]) -> str:
        name = slot[1]
        filled = rng.choice(words[name.lower()])
        if "{" in filled:
            filled = _SLOT.sub(fill, filled)
        return filled[0].upper() + filled[1:] if name[0].isupper() else filled

    phrase = _CHOICE.sub(lambda m: rng.choice(m[1].split("|")), phrase)
    text = _SLOT.sub(fill, phrase)
    text = _ARTICLE.sub(lambda m: f"{m[1]}n " if m[2].lower() in "aeiou" else f"{m[1]} ", text)
    text = re.sub(r",(?=[,.;:?])", "", text)
    return text[0].upper() + text[1:]


@lru_cache(maxsize=1)
def _grammar() -> tuple[Words, dict[str, list[Phrases]]]:
    """The general phrases, and the four lines of each theme."""
    general: Words = {}
    themes: dict[str, list[Phrases]] = {}
    section = ""
    for line in Path(__file__).with_name("prose.txt").read_text(encoding="utf-8").splitlines():
        phrases = tuple(line.split(" | "))
        if line.startswith("== "):
            section = line.removeprefix("== ")
        elif line and not line.startswith("#"):
            if section.startswith("theme "):
                themes.setdefault(section.removeprefix("theme "), []).append(phrases)
            else:
                general[section] = general.get(section, ()) + phrases
    return general, themes


def _theme_words(theme: str, lines: list[Phrases]) -> Words:
    things, people, places, deeds = lines
    return {
        "theme": (theme,),
        "thing": things,
        "things": tuple(_plural(thing) for thing in things),
        "someone_bare": people,
        "people": tuple(_plural(person) for person in people),
        "place": places,
        "did": deeds,
    }


def _plural(noun: str) -> str:
    if noun.endswith("man"):
        return noun[:-2] + "en"
    if noun.endswith(("shelf", "loaf")):
        return noun[:-1] + "ves"
    if noun.endswith("sis"):
        return noun[:-2] + "es"
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"
