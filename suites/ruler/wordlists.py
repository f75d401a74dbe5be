"""Words from the wonderwords package, as RULER draws them."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from random import Random


@lru_cache(maxsize=1)
def _lists() -> tuple[list[str], list[str], list[str]]:
    from wonderwords import Defaults, RandomWord

    words = RandomWord(noun=Defaults.NOUNS, adjective=Defaults.ADJECTIVES, verb=Defaults.VERBS)
    nouns, adjectives, verbs = (
        sorted({word.strip() for word in words.filter(include_categories=[kind])})
        for kind in ("noun", "adjective", "verb")
    )
    return nouns, adjectives, verbs


def pair(rng: Random) -> str:
    """An adjective-noun pair, such as "wet-harbour": about six million of them."""
    nouns, adjectives, _ = _lists()
    return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"


@lru_cache(maxsize=1)
def single() -> tuple[str, ...]:
    """All nouns, adjectives and verbs, sorted, each once whatever its case."""
    return tuple(sorted({word.lower(): word for words in _lists() for word in words}.values()))


@lru_cache(maxsize=1)
def distinctive() -> tuple[str, ...]:
    """The words of `single` that stand in no other of them, so that finding one is not finding another."""
    inner: set[str] = set()
    for word in map(str.lower, single()):
        inner.update(word[i:j] for i in range(len(word)) for j in range(i + 1, len(word) + 1) if j - i < len(word))
    return tuple(word for word in single() if word.lower() not in inner)


@lru_cache(maxsize=1)
def version() -> str:
    """The package's version and the hash of its lists, for the result."""
    from importlib.metadata import version as package_version

    text = "\n\n".join("\n".join(words) for words in _lists())
    return f"{package_version('wonderwords')} sha256:{hashlib.sha256(text.encode()).hexdigest()}"
