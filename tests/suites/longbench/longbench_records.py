"""Made-up records of every task, in the hub's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evictbench.suites.longbench.tasks import CHINESE, OFFICIAL
from evictbench.suites.longbench.templates import TEMPLATES

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
