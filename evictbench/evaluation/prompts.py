"""The prompts of a run: which documents fit the window, and how many tokens each answer may have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.evaluation import tasks
from evictbench.evaluation.checks import Checked
from evictbench.evaluation.settings import RunSettings
from evictbench.evaluation.thinking import Thinking
from evictbench.store.run_folder import Key
from evictbench.suite.chat_template import ChatTemplate

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PlannedSample:
    """One answer to be generated: its prompt, its limit in tokens, and its number among the prompt's answers."""

    prompt: tasks.Prompt
    max_new_tokens: int
    repeat: int = 0

    @property
    def key(self) -> Key:
        """Task, document, repeat."""
        return self.prompt.task, self.prompt.doc_id, self.repeat

    @property
    def draw(self) -> tuple[int, int]:
        """The seed of its random numbers: 64 bits that stand for task and document, and the repeat. It is the same
        under every policy and on every machine."""
        name = f"{self.prompt.task}\n{self.prompt.doc_id}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]), self.repeat

    @property
    def compressible(self) -> int:
        """The tokens of which a budget's share is taken: the context if the question is unseen, else the prompt."""
        return len(self.prompt.ids) if self.prompt.border is None else self.prompt.border


@dataclass
class Prompts:
    """Every prompt of a run that fits the window with its answer.

    template: the chat template; None for plain text. window: tokens that the model holds. model: its name, for
    sentences. planned: the first answer to each prompt. answers_cut: task to the number of documents whose answers may
    have fewer tokens than the task's card gives. overlong: task to the documents that do not fit and are left out.
    """

    settings: RunSettings
    checked: Checked
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate | None
    thinking: Thinking
    window: int
    model: str
    planned: list[PlannedSample] = field(default_factory=list)
    answers_cut: dict[str, int] = field(default_factory=dict)
    overlong: dict[str, list[int]] = field(default_factory=dict)

    def make(self, loaded: Mapping[str, ConfigurableTask]) -> None:
        """Render and encode the documents of every task.

        Raises UserError for a prompt that does not fit, unless --skip-overlong is given, and where none is left.
        """
        checked = self.checked
        for task in loaded.values():
            for prompt in tasks.prompts(
                task,
                self.tokenizer,
                chat=self.template is not None,
                context_field=checked.suite.context_field if checked.protocol.question == "unseen" else None,
                limit=checked.limit,
                thinking=self.thinking,
                template=str(self.template),
                suite=checked.suite.name,
            ):
                self._add(prompt)
        if not self.planned:
            raise UserError(
                f"No prompt of {checked.suite.name} fits the window of {self.model}, {self.window} tokens, with its "
                "answer: nothing is left to run."
            )

    def in_order(self, repeats: int) -> tuple[PlannedSample, ...]:
        """All answers to be generated: document by document, the tasks taking turns, then the next repeat."""
        once = sorted(self.planned, key=lambda planned: planned.prompt.doc_id)
        return tuple(replace(planned, repeat=repeat) for repeat in range(repeats) for planned in once)

    def _add(self, prompt: tasks.Prompt) -> None:
        limit = self.checked.protocol.answer_limit
        room = self.window - len(prompt.ids)
        allowed = limit.within(room, prompt.max_new_tokens)
        if not 1 <= allowed <= room:
            if not self.settings.skip_overlong:
                raise UserError(
                    f"The prompt of {prompt.task}, sample {prompt.doc_id}, has {len(prompt.ids)} tokens; with "
                    f"{limit.wanted(prompt.max_new_tokens)} for the answer that is more than the window of "
                    f"{self.model}, {self.window} tokens (--skip-overlong leaves such samples out)."
                )
            self.overlong.setdefault(prompt.task, []).append(prompt.doc_id)
            return
        if allowed < limit.by_card(prompt.max_new_tokens):
            self.answers_cut[prompt.task] = self.answers_cut.get(prompt.task, 0) + 1
        self.planned.append(PlannedSample(prompt, allowed))
