"""The prompts of a run: which documents fit the window, and how many tokens each answer may have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.evaluation import tasks

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase

    from evictbench.evaluation.checks import Checked
    from evictbench.evaluation.settings import Settings
    from evictbench.evaluation.thinking import Thinking
    from evictbench.store.run_folder import Key


@dataclass(frozen=True)
class Planned:
    """One answer to be made: its prompt, how many tokens it may have, and which of the prompt's answers it is."""

    prompt: tasks.Prompt
    max_new_tokens: int
    repeat: int = 0

    @property
    def key(self) -> Key:
        """Task, document, repeat."""
        return self.prompt.task, self.prompt.doc_id, self.repeat

    @property
    def draw(self) -> tuple[int, int]:
        """What its random numbers are made from: 64 bits that stand for the sample, under every policy and on every
        machine the same, and the repeat."""
        name = f"{self.prompt.task}\n{self.prompt.doc_id}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]), self.repeat

    @property
    def compressible(self) -> int:
        """The tokens that a budget's share is of: the context if the question is unseen, else the prompt."""
        return len(self.prompt.ids) if self.prompt.border is None else self.prompt.border


@dataclass
class Prompts:
    """Every prompt of a run with the room for its answer.

    window: tokens that the model holds. cut: task to how many documents have less room than the card gives.
    overlong: task to the documents that do not fit the window, where --skip-overlong leaves them out.
    """

    settings: Settings
    checked: Checked
    tokenizer: PreTrainedTokenizerBase
    chat: bool
    thinking: Thinking
    window: int
    model: str
    planned: list[Planned] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    overlong: dict[str, list[int]] = field(default_factory=dict)

    def make(self, loaded: Mapping[str, ConfigurableTask]) -> None:
        """Render and encode the documents of every task."""
        checked = self.checked
        for task in loaded.values():
            for prompt in tasks.prompts(
                task,
                self.tokenizer,
                chat=self.chat,
                context_field=checked.suite.context_field if checked.protocol.question == "unseen" else None,
                limit=checked.limit,
                thinking=self.thinking,
            ):
                self._add(prompt)
        if not self.planned:
            raise UserError(
                f"No prompt of {checked.suite.name} fits the window of {self.model}, {self.window} tokens, with its "
                "answer: nothing is left to run."
            )

    def in_order(self, repeats: int) -> tuple[Planned, ...]:
        """All answers to be made: document by document round the tasks, repeat after repeat."""
        once = sorted(self.planned, key=lambda planned: planned.prompt.doc_id)
        return tuple(replace(planned, repeat=repeat) for repeat in range(repeats) for planned in once)

    def _add(self, prompt: tasks.Prompt) -> None:
        limit = self.settings.max_new_tokens
        card = self.checked.protocol.preset.max_new_tokens or prompt.max_new_tokens
        room = self.window - len(prompt.ids)
        wanted = int(limit) if limit.isdigit() else card
        allowed = min(wanted, room) if limit == "auto" else wanted
        if not 1 <= allowed <= room:
            if not self.settings.skip_overlong:
                raise UserError(
                    f"The prompt of {prompt.task}, sample {prompt.doc_id}, has {len(prompt.ids)} tokens; with {wanted} "
                    f"for the answer that is more than the window of {self.model}, {self.window} tokens "
                    "(--skip-overlong leaves such samples out)."
                )
            self.overlong.setdefault(prompt.task, []).append(prompt.doc_id)
            return
        if allowed < card:
            self.cut[prompt.task] = self.cut.get(prompt.task, 0) + 1
        self.planned.append(Planned(prompt, allowed))
