"""The tasks, their groups and the protocols that run them. Data only.

Facts from THUDM/LongBench (MIT): LongBench/pred.py, eval.py and config/dataset2maxlen.json; checked by the tests
against the task files (YAML).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from evictbench.suite import Protocol

VERSION = "1.0"  # of prompts and grading: raise a task's when any of them changes (its YAML states it too)

HUB = "zai-org/LongBench"  # THUDM/LongBench until it was renamed
REVISION = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"
ARCHIVE = "data.zip"  # holds data/<name>.jsonl; its loading script is no longer supported

Metric = Literal[
    "f1",
    "f1_zh",
    "first_line_f1",
    "rouge_l",
    "rouge_l_zh",
    "first_line_rouge_l",
    "classification",
    "retrieval",
    "count",
    "code",
]


@dataclass(frozen=True)
class Task:
    """One task.

    records: the file that holds its records, <records>.jsonl. template: its key in templates.py. answer_tokens: the
    token limit of an answer. metric: the function in grade.py. chat: whether the chat template may wrap the prompt;
    upstream leaves it out where the prompt is a text to continue. ends: texts whose last token ends an answer, beside
    the model's end tokens. min_new_tokens: tokens that come before any of those can. version: of prompt and grading.
    """

    records: str
    template: str
    answer_tokens: int
    metric: Metric
    chat: bool = True
    ends: tuple[str, ...] = ()
    min_new_tokens: int = 0
    version: str = VERSION


def _task(name: str, answer_tokens: int, metric: Metric, chat: bool = True) -> Task:
    return Task(name, name, answer_tokens, metric, chat)


OFFICIAL: dict[str, Task] = {
    "narrativeqa": _task("narrativeqa", 128, "f1"),
    "qasper": _task("qasper", 128, "f1"),
    "multifieldqa_en": _task("multifieldqa_en", 64, "f1"),
    "multifieldqa_zh": _task("multifieldqa_zh", 64, "f1_zh"),
    "hotpotqa": _task("hotpotqa", 32, "f1"),
    "2wikimqa": _task("2wikimqa", 32, "f1"),
    "musique": _task("musique", 32, "f1"),
    "dureader": _task("dureader", 128, "rouge_l_zh"),
    "gov_report": _task("gov_report", 512, "rouge_l"),
    "qmsum": _task("qmsum", 512, "rouge_l"),
    "multi_news": _task("multi_news", 512, "rouge_l"),
    "vcsum": _task("vcsum", 512, "rouge_l_zh"),
    "trec": _task("trec", 64, "classification", chat=False),
    "triviaqa": _task("triviaqa", 32, "first_line_f1", chat=False),
    # The prompt ends in "Summary: ", after which many models begin with a newline; upstream does not let them.
    "samsum": replace(
        _task("samsum", 128, "first_line_rouge_l", chat=False), ends=("\n",), min_new_tokens=1, version="1.1"
    ),
    "lsht": _task("lsht", 64, "classification", chat=False),
    "passage_count": _task("passage_count", 32, "count"),
    "passage_retrieval_en": _task("passage_retrieval_en", 32, "retrieval"),
    "passage_retrieval_zh": _task("passage_retrieval_zh", 32, "retrieval"),
    "lcc": _task("lcc", 64, "code", chat=False),
    "repobench-p": _task("repobench-p", 64, "code", chat=False),
}

CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
ENGLISH_AND_CODE = tuple(name for name in OFFICIAL if name not in CHINESE)

E_TASKS = (
    "qasper",
    "multifieldqa_en",
    "hotpotqa",
    "2wikimqa",
    "gov_report",
    "multi_news",
    "trec",
    "triviaqa",
    "samsum",
    "passage_count",
    "passage_retrieval_en",
    "lcc",
    "repobench-p",
)
"""The tasks of LongBench-E. Each has as many records below 4,000 words as from there to 8,000, and above."""

LONGBENCH_E: dict[str, Task] = {f"{name}_e": replace(OFFICIAL[name], records=f"{name}_e") for name in E_TASKS}

DOCUMENTS: dict[str, int] = {
    **dict.fromkeys(OFFICIAL, 200),
    **{"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500},
    **dict.fromkeys(LONGBENCH_E, 300),
    **{"qasper_e": 224, "multifieldqa_en_e": 150, "multi_news_e": 294},
}
"""Records of each file: task.md of THUDM/LongBench at 2e00731, and for LongBench-E table 8 of the paper."""

_AS_ROUGE_L: dict[Metric, Metric] = {"first_line_f1": "first_line_rouge_l", "classification": "first_line_rouge_l"}

ROUGE_L: dict[str, Task] = {
    f"{name}_rouge": replace(OFFICIAL[name], metric=_AS_ROUGE_L.get(OFFICIAL[name].metric, "rouge_l"))
    for name in ENGLISH_AND_CODE
    if not OFFICIAL[name].metric.endswith("rouge_l")
}
"""The prompts of the official tasks graded with ROUGE-L, for protocols that grade all of LongBench that way."""

TASKS: dict[str, Task] = {**OFFICIAL, **LONGBENCH_E, **ROUGE_L}

_UPSTREAM = "Bai et al., LongBench, arXiv:2308.14508; THUDM/LongBench at 2e00731"

_DISTILLCACHE = Protocol(
    source="DistillCache (arXiv:2608.08878), section 4.1 and appendix D: official prompts, ROUGE-L, greedy, 512 "
    "tokens; 2wikimqa is trained on and left out",
    tasks=tuple(
        f"{name}_rouge" if f"{name}_rouge" in ROUGE_L else name for name in ENGLISH_AND_CODE if name != "2wikimqa"
    ),
    question="seen",
    max_new_tokens=512,
)

PROTOCOLS: dict[str, Protocol] = {
    "default": Protocol(source=f"{_UPSTREAM}: greedy; the 16 tasks in English and code", tasks=ENGLISH_AND_CODE),
    "bilingual": Protocol(source=f"{_UPSTREAM}: greedy; all 21 tasks", tasks=tuple(OFFICIAL)),
    "longbench_e": Protocol(source=f"{_UPSTREAM}: pred.py --e; its 13 tasks", tasks=tuple(LONGBENCH_E)),
    "distillcache": _DISTILLCACHE,
    **{
        f"distillcache_{length}": replace(
            _DISTILLCACHE,
            source=f"DistillCache (arXiv:2608.08878), table 2, {length.upper()}: as its other tables; how prompts come "
            f"to this length is not said, so ours: {tokens:,} tokens with the answer, cut in the middle",
            context=tokens,
        )
        for length, tokens in {"2k": 2048, "4k": 4096, "8k": 8192}.items()
    },
    "indexmem_pp": Protocol(
        source="IndexMem++, Chooovy/kvpress at 5a5826ed (docs/paper_protocols.md, configs/evaluation/longbench.yaml): "
        "greedy, no thoughts, the context compressed without its question; its list of tasks is not known to us",
        tasks=ENGLISH_AND_CODE,
        thinking=False,
        question="unseen",
    ),
}
