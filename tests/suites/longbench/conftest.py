"""A small tokenizer made on the spot, made-up records for all the tasks, and a way to prepare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suites.longbench import SUITE
from evictbench.suites.longbench.tasks import CHINESE, LONGBENCH_E, OFFICIAL
from evictbench.suites.longbench.templates import TEMPLATES

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

ENGLISH = "On day {i} the crew of the Marlin ate {i} loaves, and {name} wrote the number {i} into the log.\n"
CHINESE_LINE = "第{i}天，{name}在日记里写下了数字{i}，然后去山上看日出。\n"
CODE = "def step_{i}(log: list[int]) -> int:\n    return log[{i}] + {i}\n\n"
NAMES = ("Ada", "Bo", "Cleo", "Dov", "Eli", "Fay")


def context_of(task: str, number: int, lines: int) -> str:
    name = task.removesuffix("_e")
    line = CODE if OFFICIAL[name].metric == "code" else CHINESE_LINE if name in CHINESE else ENGLISH
    return "".join(line.format(i=i + number, name=NAMES[(i * 5 + number) % 6]) for i in range(lines)).rstrip("\n")


def record(task: str, number: int, lines: int = 12) -> dict[str, Any]:
    """A record in the hub's format, of invented text."""
    metric = OFFICIAL[task.removesuffix("_e")].metric
    classes = ["Food", "Date", "Other location", "Other number"] if metric == "classification" else None
    answers = {"classification": ["Other number"], "retrieval": [f"Paragraph {number + 2}"], "count": [str(number + 1)]}
    if task == "passage_retrieval_zh":
        answers["retrieval"] = [f"段落{number + 2}"]
    asked = "{input}" in TEMPLATES[task.removesuffix("_e")]
    return {
        "input": f"Who wrote the number {number} into the log?" if asked else "",
        "context": context_of(task, number, lines),
        "answers": answers.get(metric, [f"{NAMES[number]} wrote it", NAMES[number]]),
        "length": 1000 * (4 * number + 1),
        "dataset": task,
        "language": "zh" if task in CHINESE else "en",
        "all_classes": classes,
        "_id": f"invented/{task}/{number}",
    }


def write(folder: Path, task: str, records: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(one, ensure_ascii=False) for one in records]
    (folder / f"{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def longbench_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for task in (*OFFICIAL, *LONGBENCH_E):
        write(folder / "longbench", task, [record(task, number) for number in range(3)])
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level BPE; most Chinese characters are two or three tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([text for text in TEMPLATES.values() if text.isascii()], trainer)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def prepare(tokenizer, longbench_dir):
    """`prepare(*tasks, chat=..., window=..., ...)` with the small tokenizer and the made-up records."""

    def prepare(*tasks: str, **changes: Any) -> PreparedSuite:
        request = {"tokenizer": tokenizer, "chat": True, "data_dir": longbench_dir, **changes}
        return SUITE.prepare(SuiteRequest(tasks=tasks or None, **request))

    return prepare
