"""What a suite tells the engine about itself. A suite is found by entry point; its tasks are lm-eval YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from evictbench.suite.survey import DataFound

Question = Literal["seen", "unseen"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 leave the distribution whole."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


GREEDY = Sampling()


@dataclass(frozen=True)
class Protocol:
    """A named way to run a suite: values, no code. What it leaves at None is the suite's, the task card's or the chat
    template's own.

    source: the paper, model card or harness that the values are from. tasks: the default set, by the names of the YAML.
    model_sampling: sampling of models whose name, without its owner, fits a pattern ("qwen3-*-instruct-*", small
    letters); the first that fits stands in for `sampling`. repeats: answers per document. chat: None for the chat
    template wherever the tokenizer has one and the task allows it. thinking: whether the template lets the model think.
    system_prompt: what the system says in the chat template. context: tokens of a sample. limit: documents of a task.
    share_of: what a budget in percent is a share of: each prompt, or the context that the run asks for, which makes it
    a number of entries.
    """

    source: str
    tasks: tuple[str, ...]
    sampling: Sampling = GREEDY
    model_sampling: Mapping[str, Sampling] = field(default_factory=dict)
    repeats: int = 1
    chat: bool | None = None
    thinking: bool | None = None
    system_prompt: str | None = None
    question: Question | None = None
    context: int | None = None
    limit: int | None = None
    max_new_tokens: int | None = None
    share_of: Literal["prompt", "context"] = "prompt"

    def sampling_for(self, model: str) -> Sampling:
        """How this protocol samples a model. model: its name in results, "Qwen/Qwen3-8B" or that of a folder."""
        name = model.partition("@")[0].rpartition("/")[2].lower()
        fitting = (sampling for pattern, sampling in self.model_sampling.items() if fnmatchcase(name, pattern))
        return next(fitting, self.sampling)


@dataclass(frozen=True)
class SuiteRequest:
    """What a run asks of a suite before any model weight is loaded.

    tasks: names to prepare, or None for the suite's default set. named: the user named them; otherwise they are a
    protocol's set, of which a task without data is left out with a sentence.
    context: total tokens per sample, answer and chat template included; None where the suite has no such notion.
    limit: samples per task; sample i must not depend on it.
    chat: whether prompts will be wrapped in the tokenizer's chat template.
    window: tokens that the model can hold, prompt and answer together. max_new_tokens: what the run fixes for every
    answer, None for each task's own. Both matter to suites that cut prompts by a rule of their own.
    version: one of the suite's `versions`, None for the first.
    """

    tokenizer: PreTrainedTokenizerBase
    chat: bool
    tasks: tuple[str, ...] | None = None
    named: bool = True
    context: int | None = None
    limit: int | None = None
    seed: int = 0
    data_dir: Path | None = None
    haystack: Path | None = None
    window: int | None = None
    max_new_tokens: int | None = None
    version: str | None = None


@dataclass(frozen=True)
class PreparedSuite:
    """A suite made ready: which tasks will run, and what goes into the result about their data.

    metadata is handed to lm-eval's TaskManager, and from there to the tasks' `custom_dataset` functions.
    skipped maps a task of the default set to the sentence that says why it is not run.
    data maps every input (word list, haystack, file) to its content hash or version.
    warnings are sentences about the data that a user should read, such as how many documents are missing.
    """

    tasks: tuple[str, ...]
    metadata: Mapping[str, Any]
    skipped: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """A named set of lm-eval tasks in one folder.

    context_field: the doc field whose end, in the rendered prompt, is the border between context and question;
    None for tasks without a question, which are always seen.
    protocols: named presets; "default" is what runs without --protocol. Where there are none, the default is greedy,
    once, over `tasks`.
    generator: makes of a plan, and of what loads its model, what answers its requests in place of generated text, with
    `run(requests)` and completions that carry a `score` and `metrics` of their own; None for tasks that generate.
    stated_length: tokens that a budget in entries is a share of, for policies that take shares: where answers are much
    longer than prompts; None for the context that the run asks for, or else each prompt.
    versions: those of its prompts that can still be made. The first is the newest and the default; earlier ones are
    there so that old results can be extended. () for a suite that has only the one its tasks name.
    survey: says what of the suite's data lies in a folder; None for a suite that reads none.
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
    protocols: Mapping[str, Protocol] = field(default_factory=dict)
    generator: Callable[[Any, Callable[[Any], Any]], Any] | None = None
    stated_length: int | None = None
    versions: tuple[str, ...] = ()
    survey: Callable[[Path], Sequence[DataFound]] | None = None

    @property
    def all_protocols(self) -> Mapping[str, Protocol]:
        """The suite's protocols; for a suite without any, a greedy "default" that runs all its tasks once."""
        return self.protocols or {"default": Protocol(source="", tasks=self.tasks)}
