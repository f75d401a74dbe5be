"""The law of a subset of fixed size, `P(A) = Π_{i in A} exp(s_i) / e_B(exp s)` for |A| = B, and two samplers.

e_B is the elementary symmetric polynomial, a sum over all subsets of B. It is the count's law of independent draws in
disguise: with chances `p_i = sigmoid(s_i + θ)`, `e_B(exp s) = Π (1 + exp(s_i + θ)) · exp(-θB) · P(N = B)`, N being how
many of them come out. θ is set so that B are expected; then B is N's most likely value (Darroch) and P(N = B) at least
1 / (L + 1), so that the dynamic programme over chances, in float64, meets neither overflow nor cancellation, and what
underflows in it is what does not matter. It counts whichever are fewer, those in the subset or those out of it.

DistillCache (arXiv 2608.08878) states this law. The sampler that it names, Gumbel top-B, does not follow it: that one
draws one after the other without replacement (Plackett-Luce), and a set's chance is a sum over the orders in which it
can be drawn. `conditional_poisson` does follow it.

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


def log_partition(scores: Tensor, size: int | Tensor) -> Tensor:
    """`log e_size(exp scores)`, `[..]` in the scores' dtype; -inf where fewer than `size` scores are finite.

    size: one for all, or `[..]`. Time O(L·B) and memory O(L + B) with B = min(size, L - size), the largest of the
    batch; the gradient, the chance of each entry to be chosen, takes O(√L·B). It can be taken once, not twice.
    """
    found: Tensor = _LogPartition.apply(scores, _sizes(scores, size))  # type: ignore[no-untyped-call]
    return found


def log_probability(scores: Tensor, chosen: Tensor) -> Tensor:
    """The law's log-probability `[..]` of the subsets `chosen` `[.., L]` bool, among those of their size."""
    return scores.masked_fill(~chosen, 0.0).sum(-1) - log_partition(scores, chosen.sum(-1))


@torch.no_grad()
def inclusion(scores: Tensor, size: int | Tensor) -> Tensor:
    """The chance of each entry to be in the subset, `[.., L]`; they add up to `size`."""
    counting = _Counting.of(scores, _sizes(scores, size))
    return counting.inclusion().to(scores).view(scores.shape)


@torch.no_grad()
def gumbel_top(scores: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """The `size` largest of the scores with Gumbel noise: `[.., L]` bool. Plackett-Luce draws, not this law's.

    generator: on the scores' device.
    """
    uniform = torch.rand(scores.shape, generator=generator, dtype=torch.float64, device=generator.device)
    noise = -(-uniform.clamp(min=torch.finfo(torch.float64).tiny).log()).log()
    largest = (scores + noise.to(scores.device)).topk(_possible(scores, size), dim=-1).indices
    return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter(-1, largest, True)


@torch.no_grad()
def conditional_poisson(scores: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Subsets `[.., L]` bool drawn from the law, exactly: independent draws, given that `size` of them come out.

    From the last entry to the first, each is drawn with its chance given how many are still wanted of it and those
    before it, which the dynamic programme's table has. Memory O(√L·B), as the gradient's.
    """
    counting = _Counting.of(scores, _sizes(scores, _possible(scores, size)))
    uniform = torch.rand(counting.take.shape, generator=generator, dtype=torch.float64, device=generator.device)
    uniform = uniform.to(counting.take.device)
    wanted = counting.target.clone()
    drawn = torch.zeros_like(counting.take, dtype=torch.bool)
    for item, before in counting.backwards():
        one_less = before.gather(1, (wanted - 1).clamp(min=0)[:, None])[:, 0]
        taken = counting.take[item] * one_less * (wanted > 0)
        left = counting.leave[item] * before.gather(1, wanted[:, None])[:, 0]
        drawn[item] = uniform[item] * (taken + left) < taken
        wanted = wanted - drawn[item].long()
    chosen = counting.real & (drawn.T ^ counting.flipped)
    return chosen.to(scores.device).view(scores.shape)


class _LogPartition(torch.autograd.Function):
    """Keeps the scores alone for its backward pass."""

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
    """Independent draws, one an item, of which `target` are wanted; batches `[rows, L]` laid out item by item.

    take, leave: `[L, rows]`, the chance to count and not to, of which neither is the other's rounded rest; padding
    never counts. flipped: what counts is being left out of the subset. logarithm: `[rows]`, what `log P(N = target)`
    is short of the log-partition. real: `[rows, L]`, what is not padding.
    """

    take: Tensor
    leave: Tensor
    target: Tensor
    flipped: bool
    logarithm: Tensor
    real: Tensor

    @classmethod
    def of(cls, scores: Tensor, size: Tensor) -> _Counting:
        """Draws whose law, given how many come out, is that of the subset; size `[..]`."""
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
        """Counts that the programme tells apart: 0 .. the largest target."""
        return max(0, int(self.target.amax())) + 1 if self.target.numel() else 1

    def log_partition(self) -> Tensor:
        """`[rows]`; -inf where the target cannot be reached."""
        state = self._begin()
        for item in range(len(self.take)):
            state = self._after(state, item)
        return self.logarithm + self._at_target(state).log()

    def inclusion(self) -> Tensor:
        """`[rows, L]`: the chance of each entry to be in the subset; 0 where there is no such subset."""
        found = torch.zeros_like(self.take)
        rest = torch.zeros_like(self._begin())  # the chance to come to the target, by the count so far
        rest.scatter_(1, self.target.clamp(min=0)[:, None], (self.target >= 0).to(rest)[:, None])
        for item, before in self.backwards():
            found[item] = self.take[item] * (before[:, :-1] * rest[:, 1:]).sum(-1)
            further = rest * self.leave[item, :, None]
            further[:, :-1].addcmul_(rest[:, 1:], self.take[item, :, None])
            rest = further
        reached = rest[:, 0]
        counted = (found / reached).T.masked_fill(reached[:, None] <= 0, float(self.flipped))
        return (1 - counted if self.flipped else counted).masked_fill(~self.real, 0.0)

    def backwards(self) -> Iterator[tuple[int, Tensor]]:
        """The items from last to first, each with the law of the count before it, `[rows, width]`.

        Only every √L-th is kept on the way forward; those between are computed again, block by block.
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
        """Nothing has been counted."""
        state = self.take.new_zeros(self.take.shape[1], self.width)
        state[:, 0] = 1
        return state

    def _after(self, state: Tensor, item: int) -> Tensor:
        """The law of the count with one item more."""
        following = state * self.leave[item, :, None]
        following[:, 1:].addcmul_(state[:, :-1], self.take[item, :, None])
        return following

    def _at_target(self, state: Tensor) -> Tensor:
        reached = state.gather(1, self.target.clamp(min=0)[:, None])[:, 0]
        return reached.masked_fill(self.target < 0, 0.0)


def _tilt(rows: Tensor, real: Tensor, size: Tensor, count: Tensor) -> Tensor:
    """θ `[rows]` at which `size` of the draws are expected to come out, by bisection.

    Half a draw short of none and of all, where it would be infinite.
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
    """One size for each of the batch, `[..]` int64."""
    wanted = torch.as_tensor(size, dtype=torch.int64, device=scores.device)
    return wanted.expand(scores.shape[:-1])


def _possible(scores: Tensor, size: int) -> int:
    """A size that every row of scores has entries for; ValueError where one has not."""
    if size < 0 or bool(((scores > -torch.inf).sum(-1) < size).any()):
        raise ValueError(f"There is no subset of {size} entries: a row has fewer that can be chosen.")
    return size
