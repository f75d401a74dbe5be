"""One text read by a teacher that keeps everything and by students that evict: their choices, and what those cost.

The prompt is read once, whole. Then the teacher reads on. The students, rows of one cache, each cut the prompt's cache
and are fed the same tokens one by one, choosing again after each. They are fed the text and not their own generation:
teacher and students see the same tokens at every step, as the reward needs, and no token depends on a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from evictbench.cache.slots.cache import SlotCache
from evictbench.generation.runner import ModelRunner
from evictbench.train.distillation import at_least_float32

from . import DistillCache
from .features import RECENT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.policy import Phase, Step
    from evictbench.policy.budget import Budget

Choose = Callable[["Choice"], Tensor]
"""Makes a choice: returns the entries that stay, `[rows, slots]` bool, `size` in every row."""


@dataclass(frozen=True)
class Choice:
    """A choice that is due.

    features: `[rows or 1, slots, 5]` float32. positions: `[rows or 1, slots]` int64. size: how many entries stay. rows:
    students that choose. first: the first step whose prediction the choice changes; 0 for the prompt's cut.
    """

    features: Tensor
    positions: Tensor
    size: int
    rows: int
    first: int


@dataclass(frozen=True)
class Decision:
    """A choice that was made. chosen: the entries that stay, `[rows, slots]` bool."""

    choice: Choice
    chosen: Tensor


@dataclass(frozen=True)
class Episode:
    """The students' decisions on one text, and their cost.

    kl: `[rows, steps]`, KL(teacher ‖ student) in nats of the prediction after each token that was fed. attention: the
    teacher's of each of those tokens, `[steps, stop]`, the mean over layers and query heads; None where nobody asked.
    """

    decisions: list[Decision]
    kl: Tensor
    attention: Tensor | None = None


class Teacher(DistillCache):
    """The teacher's policy: it keeps everything. last: the last layer's view at the end of a pass."""

    last: Step

    def keep(self, budget: int, phase: Phase) -> int | None:
        """No limit."""
        return None

    def observe(self, step: Step) -> None:
        """Remember the view, from which the features can be made."""
        super().observe(step)
        self.last = step


class Student(DistillCache):
    """The students' policy: it chooses by a function in place of its network, and records its decisions.

    fed: tokens that were fed after the prompt.
    """

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.choose = choose
        self.decisions: list[Decision] = []
        self.fed = 0

    def score(self, step: Step) -> Tensor:
        """1 for the entries that stay and 0 for the others."""
        features = self.features(step)
        positions = step.positions[:, 0].to(features.device, torch.int64)
        size = int(step.budgets[0, -1]) - 1
        chosen = self.decide(Choice(features, positions, size, len(features), self.fed))
        return chosen[:, None].float().to(step.positions.device)

    def decide(self, choice: Choice) -> Tensor:
        """Make a choice, and record it; the entries that stay, `[rows, slots]` bool."""
        chosen = self.choose(choice)
        self.decisions.append(Decision(choice, chosen))
        return chosen


class TeacherRun:
    """A text that the teacher has read up to its prompt's end.

    features: of the prompt's entries then, `[1, prompt, 5]`. positions: theirs, `[1, prompt]`.
    """

    def __init__(self, model: PreTrainedModel, tokens: Sequence[int], prompt: int, budget: Budget) -> None:
        self.tokens, self.prompt, self.budget = list(tokens), prompt, budget
        self.model = model
        self.policy = Teacher()
        self.runner = ModelRunner(model, self.policy, budget)
        cache = self.runner.prompt_cache(self.tokens[:prompt], None)
        assert isinstance(cache, SlotCache)
        self.cache = cache
        for start, stop in self.runner.chunks(prompt, None):
            self.runner.forward(self.cache, [self.tokens[start:stop]], [start])
        self.features = self.policy.features(self.policy.last)
        self.positions = self.policy.last.positions[:, 0].to(self.features.device, torch.int64)
        self._snapshot = _Snapshot(self.cache)

    def read_on(self, stop: int) -> tuple[Tensor, Tensor]:
        """Read on up to the token `stop`. Returns the teacher's logits after each token, `[tokens, vocabulary]`, and
        the attention of each, `[tokens, stop]`, the mean over layers and query heads."""
        logits, attention = [], []
        for start in range(self.prompt, stop, RECENT):
            end = min(stop, start + RECENT)
            logits.append(self.runner.forward(self.cache, [self.tokens[start:end]], [start], keep=0)[0])
            ring = self.policy.last.shared["attention"][0, 0]
            rows = ring[:, torch.arange(start, end, device=ring.device) % RECENT].mT
            attention.append(torch.nn.functional.pad(rows, (0, stop - rows.shape[1])))
        return torch.cat(logits), torch.cat(attention)

    def decode(self, logits: Tensor, rows: int, choose: Choose) -> Episode:
        """Feed the text's next tokens to `rows` students. logits: the teacher's after each, `[tokens, vocabulary]`."""
        policy = Student(choose)
        runner = ModelRunner(self.model, policy, self.budget)
        cache = runner.new_cache(rows=rows)
        assert isinstance(cache, SlotCache)
        self._cut(cache, policy, rows)
        kl = []
        for step, teacher_logits in enumerate(logits):
            policy.fed = step + 1
            position = self.prompt + step
            student_logits = runner.forward(cache, [[self.tokens[position]]] * rows, [position] * rows)[:, -1]
            p, q = (at_least_float32(side).log_softmax(-1) for side in (teacher_logits, student_logits))
            kl.append((p.exp() * (p - q)).sum(-1))
        return Episode(policy.decisions, torch.stack(kl, dim=1))

    def _cut(self, cache: SlotCache, policy: Student, rows: int) -> None:
        """Cut the prompt's cache for each row by a choice of its own, and admit what stays to `cache`."""
        self._snapshot.restore()
        entries = self.cache.allowance(self.cache.rows[0], self.prompt + 1)
        if self.prompt < entries:
            for _ in range(rows):
                cache.admit(self.cache)
            return
        for row in policy.decide(Choice(self.features, self.positions, entries - 1, rows, 0)):
            self._snapshot.restore()
            self._snapshot.compact(row.nonzero()[:, 0])
            cache.admit(self.cache)


class _Snapshot:
    """The state of a one-row cache at its prompt's end, to which it can be set back.

    Later entries come behind the ones that it has. Keys and values are not copied, because an entry stays in its slot.
    """

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.buffers = [dict(layer.buffers) for layer in cache.evicting]
        self.held, self.seen = cache.rows[0].held, cache.rows[0].seen
        (placement,) = cache.placements
        self.positions = placement.positions.clone()
        self.state = {name: tensor.clone() for name, tensor in placement.state.items()}
        self.memory = {name: tensor.clone() for name, tensor in placement.memory.items()}

    def restore(self) -> None:
        """Set the cache back."""
        cache = self.cache
        for layer, buffers in zip(cache.evicting, self.buffers, strict=True):
            layer.buffers = dict(buffers)
        (placement,) = cache.placements
        placement.positions, placement.state = self.positions, dict(self.state)
        placement.memory = dict(self.memory)
        cache.rows[0].held, cache.rows[0].seen = self.held, self.seen

    def compact(self, slots: Tensor) -> None:
        """Keep only these slots of the cache, in new buffers."""
        index = slots.view(1, 1, -1)
        for layer in self.cache.evicting:
            layer.compact(None, index.to(layer.buffers["keys"].device), len(slots))
        (placement,) = self.cache.placements
        placement.compact(None, index.to(placement.device), len(slots))
        self.cache.rows[0].held = len(slots)


def later_attention(attention: Tensor, after: int, positions: Tensor, gamma: float = 1.0) -> Tensor:
    """The mean attention `[.., slots]` that entries at `positions` `[.., slots]` get from later tokens.

    attention: `[tokens, stop]`, as `TeacherRun.read_on` returns it. after: how many of its tokens are not counted.
    gamma: the weight of a token in relation to the one before it.
    """
    rows = attention[min(after, len(attention) - 1) :]
    weights = gamma ** torch.arange(len(rows), dtype=rows.dtype, device=rows.device)
    return ((weights / weights.sum()) @ rows)[positions]


def token_list(tokens: Tensor) -> list[int]:
    """Token ids `[S]` as numbers."""
    return cast("list[int]", tokens.tolist())
