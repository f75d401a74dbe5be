"""The distribution of a subset of fixed size, `P(A) = Π_{i in A} exp(s_i) / e_B(exp s)` for |A| = B, and two samplers.

e_B is the elementary symmetric polynomial, a sum over all subsets of B. It follows from independent draws: with
probabilities `p_i = sigmoid(s_i + θ)`, `e_B(exp s) = Π (1 + exp(s_i + θ)) · exp(-θB) · P(N = B)`, where N counts the
items drawn. θ is set so that B are expected; then B is N's most likely value (Darroch) and P(N = B) at least 1 / (L +
1), so that the dynamic programme over probabilities, in float64, has neither overflow nor cancellation, and only
negligible terms underflow. It counts the items inside the subset or those outside, whichever are fewer.

DistillCache (arXiv 2608.08878) states this distribution. The sampler that it names, Gumbel top-B, has a different one:
it draws item after item without replacement (Plackett-Luce), so that a set's probability is a sum over the orders in
which it can be drawn. `conditional_poisson` samples the stated distribution.

Scores are `[.., L]`, any floating dtype; -inf is never chosen (padding). Everything is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BISECTIONS = 40
"""The steps of the bisection for θ."""


def log_partition(scores: Tensor, size: int | Tensor) -> Tensor:
    """`log e_size(exp scores)`, `[..]` in the scores' dtype; -inf where fewer than `size` scores are finite.

    scores: `[.., L]`. size: one for all, or `[..]`. Time O(L·B) and memory O(L + B) with B = min(size, L - size), the
    largest of the batch. The gradient, each entry's probability to be chosen, has no derivative; memory O(√L·B).
    """
    result: Tensor = _LogPartition.apply(scores, _sizes(scores, size))  # type: ignore[no-untyped-call]
    return result


def log_probability(scores: Tensor, chosen: Tensor) -> Tensor:
    """The log-probability `[..]` of subsets `chosen` `[.., L]` bool among those of their size. scores: `[.., L]`."""
    return scores.masked_fill(~chosen, 0.0).sum(-1) - log_partition(scores, chosen.sum(-1))


@torch.no_grad()
def inclusion(scores: Tensor, size: int | Tensor) -> Tensor:
    """The probability of each entry to be in the subset, `[.., L]`, by scores `[.., L]`; the sum is `size`."""
    counting = _Counting.of(scores, _sizes(scores, size))
    return counting.inclusion().to(scores).view(scores.shape)


@torch.no_grad()
def gumbel_top(scores: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Plackett-Luce draws, not draws from `P`: the `size` largest of the scores plus Gumbel noise, `[.., L]` bool.

    scores: `[.., L]`. generator: of the noise, on any device.
    """
    uniform = torch.rand(scores.shape, generator=generator, dtype=torch.float64, device=generator.device)
    noise = -(-uniform.clamp(min=torch.finfo(torch.float64).tiny).log()).log()
    largest = (scores + noise.to(scores.device)).topk(_possible(scores, size), dim=-1).indices
    return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter(-1, largest, True)


@torch.no_grad()
def conditional_poisson(scores: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Subsets `[.., L]` bool drawn exactly from `P`: independent draws, given that `size` are drawn. scores: `[.., L]`.

    Entries are decided from the last to the first. Each is drawn with its probability given how many entries are still
    to be drawn among it and those before it, which the dynamic programme's table holds. Memory O(√L·B).
    """
    counting = _Counting.of(scores, _sizes(scores, _possible(scores, size)))
    uniform = torch.rand(counting.take.shape, generator=generator, dtype=torch.float64, device=generator.device)
    uniform = uniform.to(counting.take.device)
    remaining = counting.target.clone()
    drawn = torch.zeros_like(counting.take, dtype=torch.bool)
    for item, before in counting.backwards():
        one_less = before.gather(1, (remaining - 1).clamp(min=0)[:, None])[:, 0]
        with_item = counting.take[item] * one_less * (remaining > 0)
        without_item = counting.leave[item] * before.gather(1, remaining[:, None])[:, 0]
        drawn[item] = uniform[item] * (with_item + without_item) < with_item
        remaining = remaining - drawn[item].long()
    chosen = counting.real & (drawn.T ^ counting.flipped)
    return chosen.to(scores.device).view(scores.shape)


class _LogPartition(torch.autograd.Function):
    """`log_partition` with a backward pass that needs the scores alone."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, size: Tensor) -> Tensor:
        ctx.save_for_backward(scores, size)
        return _Counting.of(scores, size).log_partition().to(scores).view(scores.shape[:-1])

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        scores, size = ctx.saved_tensors
        return slope[..., None] * inclusion(scores, size), None


@dataclass
class _Counting:
    """Independent draws, one for each item, of which `target` `[rows]` are to succeed; batches are `[rows, L]`.

    take, leave: `[L, rows]`, the probability to count an item and not to count it, each computed by itself, so that
    neither loses digits; padding never counts. flipped: whether the items outside the subset are counted. logarithm:
    `[rows]`, the log-partition less `log P(N = target)`. real: `[rows, L]`, False for padding.
    """

    take: Tensor
    leave: Tensor
    target: Tensor
    flipped: bool
    logarithm: Tensor
    real: Tensor

    @classmethod
    def of(cls, scores: Tensor, size: Tensor) -> _Counting:
        """Draws that have the subset's distribution, given how many are drawn. scores: `[.., L]`. size: `[..]`."""
        rows = scores.detach().reshape(-1, scores.shape[-1])
        size = size.reshape(-1)
        if rows.device.type == "mps":  # no float64 there
            rows, size = rows.cpu(), size.cpu()
        rows = rows.double()
        real = rows > -torch.inf
        count = real.sum(-1)
        theta = _tilt(rows, real, size, count)
        tilted = rows + theta[:, None]
        take, leave = tilted.sigmoid(), (-tilted).sigmoid()
        logarithm = torch.nn.functional.softplus(tilted, threshold=40.0).sum(-1) - theta * size
        flipped = bool(((count - size).amax() < size.amax()).item()) if size.numel() else False
        if flipped:
            take, leave, size = leave.masked_fill(~real, 0.0), take.masked_fill(~real, 1.0), count - size
        return cls(take.T.contiguous(), leave.T.contiguous(), size, flipped, logarithm, real)

    @property
    def width(self) -> int:
        """How many counts the dynamic programme distinguishes: 0 .. the largest target."""
        return max(0, int(self.target.amax())) + 1 if self.target.numel() else 1

    def log_partition(self) -> Tensor:
        """The log-partition `[rows]`; -inf where the target cannot be reached."""
        state = self._begin()
        for item in range(len(self.take)):
            state = self._after(state, item)
        return self.logarithm + self._at_target(state).log()

    def inclusion(self) -> Tensor:
        """The probability of each entry to be in the subset, `[rows, L]`; 0 where there is no such subset."""
        counted_here = torch.zeros_like(self.take)
        rest = torch.zeros_like(self._begin())  # the probability to reach the target, by the count so far
        rest.scatter_(1, self.target.clamp(min=0)[:, None], (self.target >= 0).to(rest)[:, None])
        for item, before in self.backwards():
            counted_here[item] = self.take[item] * (before[:, :-1] * rest[:, 1:]).sum(-1)
            further = rest * self.leave[item, :, None]
            further[:, :-1].addcmul_(rest[:, 1:], self.take[item, :, None])
            rest = further
        reached = rest[:, 0]
        counted = (counted_here / reached).T.masked_fill(reached[:, None] <= 0, float(self.flipped))
        return (1 - counted if self.flipped else counted).masked_fill(~self.real, 0.0)

    def backwards(self) -> Iterator[tuple[int, Tensor]]:
        """The items from last to first, each with the distribution of the count before it, `[rows, width]`.

        Only every √L-th distribution is kept on the way forward; those between are computed again, block by block.
        """
        length = len(self.take)
        block = max(1, math.isqrt(length))
        starts = range(0, length, block)
        kept, state = [], self._begin()
        for start in starts:
            kept.append(state)
            for item in range(start, min(length, start + block)):
                state = self._after(state, item)
        for start in reversed(starts):
            states = [kept.pop()]
            for item in range(start, min(length, start + block) - 1):
                states.append(self._after(states[-1], item))
            for item in range(start + len(states) - 1, start - 1, -1):
                yield item, states.pop()

    def _begin(self) -> Tensor:
        """The distribution of the count before the first item, `[rows, width]`."""
        state = self.take.new_zeros(self.take.shape[1], self.width)
        state[:, 0] = 1
        return state

    def _after(self, state: Tensor, item: int) -> Tensor:
        """The distribution of the count after one more item."""
        following = state * self.leave[item, :, None]
        following[:, 1:].addcmul_(state[:, :-1], self.take[item, :, None])
        return following

    def _at_target(self, state: Tensor) -> Tensor:
        reached = state.gather(1, self.target.clamp(min=0)[:, None])[:, 0]
        return reached.masked_fill(self.target < 0, 0.0)


def _tilt(rows: Tensor, real: Tensor, size: Tensor, count: Tensor) -> Tensor:
    """θ `[rows]` at which `size` `[rows]` items are expected to be drawn, by bisection.

    Where θ would be infinite, the expected number is half an item more than none, or half an item less than all.
    """
    total = count.clamp(min=1).double()
    expected = size.double().clamp(min=0.5).minimum(total - 0.5)
    middle = (expected / total).logit()
    low = middle - rows.masked_fill(~real, -torch.inf).amax(-1)
    high = middle - rows.masked_fill(~real, torch.inf).amin(-1)
    low, high = (bound.masked_fill(count == 0, 0.0) for bound in (low, high))
    for _ in range(_BISECTIONS):
        theta = (low + high) / 2
        more = (rows + theta[:, None]).sigmoid().sum(-1) < expected
        low, high = torch.where(more, theta, low), torch.where(more, high, theta)
    return (low + high) / 2


def _sizes(scores: Tensor, size: int | Tensor) -> Tensor:
    """The size for each element of the batch, `[..]` int64."""
    sizes = torch.as_tensor(size, dtype=torch.int64, device=scores.device)
    return sizes.expand(scores.shape[:-1])


def _possible(scores: Tensor, size: int) -> int:
    """The size. ValueError: a row of scores has fewer entries that can be chosen."""
    if size < 0 or bool(((scores > -torch.inf).sum(-1) < size).any()):
        raise ValueError(f"There is no subset of {size} entries: a row has fewer that can be chosen.")
    return size
