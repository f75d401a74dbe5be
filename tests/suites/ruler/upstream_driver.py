"""Runs scripts of a RULER checkout in one process. Not a test: test_ruler_upstream.py starts it.

    python upstream_driver.py TOKENIZER.json SHORTEST  < arguments, a JSON list of lists: a script and its options

SHORTEST: words of each list that are used, since all pairs of all of them take a minute and a gigabyte. Sentences are
cut by our own rule, in place of a model of nltk's that would have to be fetched.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace


def module(name: str, **content: object) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(content)


def main(tokenizer_file: str, shortest: str) -> None:
    import wonderwords.random_word
    from tokenizers import Tokenizer

    from evictbench.suites.ruler.haystack import split

    tokenizer = Tokenizer.from_file(tokenizer_file)
    counted = SimpleNamespace(text_to_tokens=lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    module("tokenizer", select_tokenizer=lambda kind, path: counted)
    module("nltk")
    module("nltk.tokenize", sent_tokenize=split)
    whole = wonderwords.random_word._get_words_from_text_file
    wonderwords.random_word._get_words_from_text_file = lambda name: whole(name)[: int(shortest)]
    for script, *options in json.load(sys.stdin):
        sys.path.insert(0, str(Path(script).parent))
        sys.argv = [script, *options]
        runpy.run_path(script, run_name="__main__")
        sys.path.pop(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
