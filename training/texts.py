"""The texts that the bundled weights are trained on: `python -m training.texts --data-dir DATA --out FOLDER`.

Three kinds, each a block of about 1,024 tokens: solved GSM8K problems of the train split, pieces of Emerson's essays,
and RULER needle prompts in the chat template, asked several times over. The needles' seeds lie far from any that a
run uses, and their keys are put together from words of the essays that RULER's own word lists do not hold, so that no
prompt, word or text of a test is in them. Written as JSON lines with `text` and `kind`, in a fixed order.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.train.data import solved_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = 1024
SEED = 900_001
"""RULER's seed; runs use small ones."""


@dataclass(frozen=True)
class Counts:
    """How many blocks of GSM8K and of prose, and how many prompts of each RULER task; the essays are their haystack."""

    solved: int
    prose: int
    needles: Mapping[str, int]


SETS = {
    "scorers": Counts(44, 12, {"niah_single_1": 30, "niah_multikey_2": 18, "niah_single_2": 6, "niah_multikey_1": 6}),
    "rankers": Counts(88, 12, {}),
    "gates": Counts(64, 20, {"niah_single_1": 44, "niah_multikey_2": 28, "niah_single_2": 10, "niah_multikey_1": 10}),
}
"""The sets of texts, each a file: for KVpop's scorers; for DistillCache's ranker, which uses the first half of each
text; for DMS's gates and IndexMem++'s scorers."""

QUESTIONS = 6
"""The most needles that are asked for after one haystack."""

_NEEDLE = re.compile(r"One of the special magic (\w+) for (.+?) is: (.+?)\.(?=\s|$)")


def main() -> None:
    """Write the texts."""
    from evictbench.models import bundled, load

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", type=Path, required=True, help="a folder with gsm8k/train.jsonl and ruler/essays")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = load.load_tokenizer(load.resolve(bundled.NAME))
    essays = "\n".join(path.read_text() for path in sorted((arguments.data_dir / "ruler/essays").glob("*.txt")))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, counts in SETS.items():
        blocks = [
            *solved(counts.solved, arguments.data_dir / "gsm8k/train.jsonl", tokenizer),
            *needles(counts.needles, arguments.data_dir / "ruler/essays", tokenizer, essays),
            *prose(counts.prose, essays),
        ]
        random.Random(SEED).shuffle(blocks)
        with (arguments.out / f"{name}.jsonl").open("w") as file:
            for block in blocks:
                file.write(json.dumps(block) + "\n")
        print(f"{len(blocks)} texts in {arguments.out / name}.jsonl")


def solved(count: int, path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, str]]:
    """Problems with their solutions, packed in random order, none twice."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    random.Random(SEED).shuffle(records)
    texts = iter(solved_problems(records))
    for _ in range(count):
        block = ""
        while len(tokenizer.encode(block)) < TOKENS:
            block += next(texts)
        yield {"kind": "solved", "text": block}


def solved_problems(records: Iterable[Mapping[str, str]]) -> list[str]:
    """Records of GSM8K as problems with their solutions, each ending in an empty line."""
    return [f"{solved_problem(record['question'], record['answer'])}\n\n" for record in records]


def prose(count: int, essays: str) -> Iterator[dict[str, str]]:
    """Pieces of the essays, evenly spread."""
    for number in range(count):
        start = essays.find("\n\n", len(essays) * number // count) + 2
        yield {"kind": "prose", "text": essays[start : start + 6 * TOKENS]}


def needles(
    counts: Mapping[str, int], haystack: Path, tokenizer: PreTrainedTokenizerBase, essays: str
) -> Iterator[dict[str, str]]:
    """RULER needle prompts with other keys and their answers, followed by questions about the other needles."""
    from evictbench.evaluation.tasks import load_tasks
    from evictbench.registry import load_suite
    from evictbench.suite import SuiteRequest
    from evictbench.suites.ruler import wordlists

    rng = random.Random(SEED)
    ruler_words = {word.lower() for word in wordlists.single()}
    words = sorted(set(re.findall(r"\b[a-z]{4,9}\b", essays)) - ruler_words)
    suite = load_suite("ruler")
    for task, count in counts.items():
        room = TOKENS - (0 if "single" in task else 45 * (QUESTIONS - 1))
        request = SuiteRequest(
            tokenizer=tokenizer, tasks=(task,), context=room, limit=count, seed=SEED, chat=True, haystack=haystack
        )
        for document in load_tasks(suite, suite.prepare(request))[task].task_docs:
            keys = {key for _, key, _ in _NEEDLE.findall(document["context"])}
            context, question, prefix = document["context"], document["input"], document["gen_prefix"]
            for key in sorted(keys):
                new_key = f"{rng.choice(words)}-{rng.choice(words)}"
                context, question, prefix = (text.replace(key, new_key) for text in (context, question, prefix))
            yield {"kind": task, "text": _conversation(context, question, prefix, rng, tokenizer)}


def _conversation(
    context: str, prompt: str, prefix: str, rng: random.Random, tokenizer: PreTrainedTokenizerBase
) -> str:
    """The prompt, and questions about further needles of its context, with all answers, in the chat template."""
    needles = _NEEDLE.findall(context)
    rng.shuffle(needles)
    first_key = next(key for _, key, _ in needles if key in prefix)
    needles.sort(key=lambda needle: needle[1] != first_key)
    messages: list[dict[str, Any]] = []
    for number, (kinds, key, value) in enumerate(needles[:QUESTIONS]):
        question = prompt if number == 0 else f"What is the special magic {kinds[:-1]} for {key} mentioned in the text?"
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": f"{prefix.replace(first_key, key)} {value}."})
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


if __name__ == "__main__":
    main()
