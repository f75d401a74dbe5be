"""What a suite tells the engine about itself. A suite is found by entry point; its tasks are lm-eval YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Question = Literal["seen", "unseen"]


@dataclass(frozen=True)
class SuiteRequest:
    """What a run asks of a suite before any model weight is loaded.

    tasks: names asked for, or None for the suite's default set.
    context: total tokens per sample, answer and chat template included; None where the suite has no such notion.
    limit: samples per task; sample i must not depend on it.
    chat: whether prompts will be wrapped in the tokenizer's chat template.
    """

    tokenizer: PreTrainedTokenizerBase
    chat: bool
    tasks: tuple[str, ...] | None = None
    context: int | None = None
    limit: int | None = None
    seed: int = 0
    data_dir: Path | None = None
    haystack: Path | None = None


@dataclass(frozen=True)
class PreparedSuite:
    """A suite made ready: which tasks will run, and what goes into the result about their data.

    metadata is handed to lm-eval's TaskManager, and from there to the tasks' `custom_dataset` functions.
    skipped maps a task of the default set to the sentence that says why it is not run.
    data maps every input (word list, haystack, file) to its content hash or version.
    """

    tasks: tuple[str, ...]
    metadata: Mapping[str, Any]
    skipped: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """A named set of lm-eval tasks in one folder.

    context_field: the doc field whose end, in the rendered prompt, is the border between context and question;
    None for tasks without a question, which are always seen.
    prepare raises UserError for anything the user can put right (unknown task, context too short, missing file).
    """

    name: str
    summary: str
    folder: Path
    tasks: tuple[str, ...]
    question: Question
    context_field: str | None
    default_context: int | None
    default_limit: int | None
    prepare: Callable[[SuiteRequest], PreparedSuite]
