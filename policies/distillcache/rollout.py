"""One text read by a teacher that keeps everything and by students that do not: what they chose, and what it cost.

The prompt is read once, whole. Then the teacher reads on; and the students, rows of one cache, each cut the prompt's
cache and are fed the same tokens one by one, choosing again after each. They follow the text and not what they would
have written: both see the same tokens at every step, as the reward needs, and no token depends on a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from evictbench.generation.batching import admit
from evictbench.generation.runner import Feeder

from . import DistillCache
from .features import RECENT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.slots.cache import EvictionCache
    from evictbench.policy import Phase, Step
    from evictbench.policy.budget import Budget

Choose = Callable[["Moment"], Tensor]
"""A moment to the entries that stay, `[rows, slots]` bool, `size` in every row."""


@dataclass(frozen=True)
class Moment:
    """A choice that is due. features: `[rows or 1, slots, 5]` float32; positions: `[rows or 1, slots]` int64; size: how
    many entries stay; rows: students that choose; first: the step whose prediction the choice is the first to change,
    0 for the prompt's cut."""

    features: Tensor
    positions: Tensor
    size: int
    rows: int
    first: int


@dataclass(frozen=True)
class Decision:
    """A choice that was made. chosen: `[rows, slots]` bool."""

    moment: Moment
    chosen: Tensor


@dataclass(frozen=True)
class Episode:
    """kl: `[rows, steps]`, KL(teacher ‖ student) in nats of the prediction after each token that was fed."""

    decisions: list[Decision]
    kl: Tensor


class Teacher(DistillCache):
    """Keeps everything; `last` is what it saw at the end of a pass."""

    last: Step

    def keep(self, budget: int, phase: Phase) -> int | None:
        """Everything."""
        return None

    def observe(self, step: Step) -> None:
        """Remember the last layer's view, with which the features can be made."""
        super().observe(step)
        self.last = step


class Student(DistillCache):
    """Chooses by a function in place of its network, and notes what it chose."""

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
        moment = Moment(features, positions, size, len(features), self.fed)
        chosen = self.choose(moment)
        self.decisions.append(Decision(moment, chosen))
        return chosen[:, None].float().to(step.positions.device)


class Reading:
    """A text that the teacher has read up to its prompt's end.

    features: `[1, prompt, 5]` of the prompt's entries then.
    """

    def __init__(self, model: PreTrainedModel, tokens: Sequence[int], prompt: int, budget: Budget) -> None:
        self.tokens, self.prompt, self.budget = list(tokens), prompt, budget
        self.model = model
        self.policy = Teacher()
        self.feeder = Feeder(model, self.policy, budget)
        self.cache = self.feeder.prompt_cache(self.tokens[:prompt], None)
        for start, stop in self.feeder.passes(prompt, None):
            self.feeder.feed(self.cache, [self.tokens[start:stop]], [start])
        self.features = self.policy.features(self.policy.last)
        self.positions = self.policy.last.positions[:, 0].to(self.features.device, torch.int64)
        self._saved = _Saved(self.cache)

    def read_on(self, stop: int) -> tuple[Tensor, Tensor]:
        """The teacher reads up to the token `stop`: its logits `[tokens, vocabulary]` after each, and what each of them
        attended to, `[tokens, stop]`, the mean over layers and query heads."""
        logits, attention = [], []
        for start in range(self.prompt, stop, RECENT):
            end = min(stop, start + RECENT)
            logits.append(self.feeder.feed(self.cache, [self.tokens[start:end]], [start], keep=0)[0])
            ring = self.policy.last.shared["attention"][0, 0]
            rows = ring[:, torch.arange(start, end, device=ring.device) % RECENT].mT
            attention.append(torch.nn.functional.pad(rows, (0, stop - rows.shape[1])))
        return torch.cat(logits), torch.cat(attention)

    def decode(self, logits: Tensor, rows: int, choose: Choose) -> Episode:
        """Students that choose are fed as many tokens as `logits` has the teacher's predictions after."""
        policy = Student(choose)
        feeder = Feeder(self.model, policy, self.budget)
        cache = feeder.new_cache(rows=rows)
        self._cut(cache, policy, rows)
        kl = []
        for step, known in enumerate(logits):
            policy.fed = step + 1
            position = self.prompt + step
            found = feeder.feed(cache, [[self.tokens[position]]] * rows, [position] * rows)[:, -1]
            p, q = (_wide(side).log_softmax(-1) for side in (known, found))
            kl.append((p.exp() * (p - q)).sum(-1))
        return Episode(policy.decisions, torch.stack(kl, dim=1))

    def _cut(self, cache: EvictionCache, policy: Student, rows: int) -> None:
        """Cut the prompt's cache for each row by a choice of its own, and move what stays in."""
        self._saved.restore()
        entries = self.cache.entries(0, self.prompt + 1)
        if self.prompt < entries:
            for _ in range(rows):
                admit(cache, self.cache)
            return
        moment = Moment(self.features, self.positions, entries - 1, rows, 0)
        chosen = policy.choose(moment)
        policy.decisions.append(Decision(moment, chosen))
        for row in chosen:
            self._saved.restore()
            self._saved.compact(row.nonzero()[:, 0])
            admit(cache, self.cache)


class _Saved:
    """A one-row cache as it is at its prompt's end. Later entries may come behind those that it has; keys and values
    are not copied, because what lies in a slot stays there."""

    def __init__(self, cache: EvictionCache) -> None:
        self.cache = cache
        self.buffers = [dict(layer.buffers) for layer in cache.layers]
        self.held, self.seen = cache.held[0], cache.seen[0]
        (placement,) = cache.placements
        self.positions = placement.positions.clone()
        self.state = {name: tensor.clone() for name, tensor in placement.state.items()}
        self.memory = {name: tensor.clone() for name, tensor in placement.memory.items()}

    def restore(self) -> None:
        """Make the cache what it was."""
        cache = self.cache
        for layer, buffers in zip(cache.layers, self.buffers, strict=True):
            layer.buffers = dict(buffers)
        (placement,) = cache.placements
        placement.positions, placement.state = self.positions, dict(self.state)
        placement.memory = dict(self.memory)
        cache.held, cache.seen = [self.held], [self.seen]

    def compact(self, slots: Tensor) -> None:
        """Keep these slots, in buffers of their own."""
        index = slots.view(1, 1, -1)
        for layer in self.cache.layers:
            layer.compact(None, index.to(layer.buffers["keys"].device), len(slots))
        (placement,) = self.cache.placements
        placement.compact(None, index.to(placement.device), len(slots))
        self.cache.held = [len(slots)]


def later_attention(attention: Tensor, after: int, positions: Tensor, gamma: float = 1.0) -> Tensor:
    """What the tokens of `Reading.read_on` after the first `after` of them give to the entries at `positions`: of
    attention `[tokens, stop]` and positions `[.., slots]`, their mean `[.., slots]`, each weighing gamma times the one
    before it."""
    rows = attention[min(after, len(attention) - 1) :]
    weights = gamma ** torch.arange(len(rows), dtype=rows.dtype, device=rows.device)
    return ((weights / weights.sum()) @ rows)[positions]


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


def numbers_of(tokens: Tensor) -> list[int]:
    """A row of token ids `[S]`."""
    return cast("list[int]", tokens.tolist())
