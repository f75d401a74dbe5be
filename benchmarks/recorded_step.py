"""A decode step that is recorded once and repeated: the same kernels on the same tensors, without Python between them.

Once a cache is full, every step has the same shapes: a slot is overwritten, `budget` slots attend, one entry goes. What
differs from step to step is the position, the token and the sinks' turned keys, and those are kept in tensors that are
written before each repetition; all else that the host would hand over stays as it was recorded. Which slot is
overwritten is the device's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.paged.cache import PagedCache
from evictbench.cache.slots.cache import EvictionCache
from evictbench.errors import UserError

if TYPE_CHECKING:
    from evictbench.cache.forward_plan import Pass
    from evictbench.generation.runner import Feeder

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Run something once and record what it does; what it returns does that again."""

WARM_STEPS = 3
"""Ordinary steps before one is recorded: the first ones leave no hole, load kernels and make workspaces."""


def cuda_graph(run: Callable[[], None]) -> Callable[[], None]:
    """By a CUDA graph. Nothing runs while it is recorded, so that the first repetition is the step itself."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    again: Callable[[], None] = graph.replay
    return again


class RecordedStep:
    """One step of all rows of a cache that has made WARM_STEPS ordinary ones.

    tokens: `[rows]`, fed in the step that is recorded. moves: each repetition is the next step; False: it is the same
    step once more, at the same position, which is all that a cache that grows can repeat.
    logits: `[rows, vocabulary]`, of the last step, overwritten by the next. Raises UserError where steps differ.
    """

    def __init__(
        self, feeder: Feeder, cache: EvictionCache, tokens: Tensor, record: Record = cuda_graph, moves: bool = True
    ) -> None:
        if isinstance(cache, PagedCache):
            raise UserError("pages change hands between steps")
        self.feeder, self.cache, self.moves = feeder, cache, moves
        self.rows = len(cache.seen)
        keys = cache.layers[0].buffers["keys"]
        self.device = keys.device
        self._new = keys[: self.rows, :, :1]
        self.tokens = tokens.to(self.device).view(-1, 1).clone()
        self.positions = torch.tensor(cache.seen, device=self.device)[:, None]
        vocabulary = feeder.model.config.get_text_config(decoder=True).vocab_size
        self.logits = torch.empty((self.rows, vocabulary), dtype=feeder.model.dtype, device=self.device)
        self._turned: dict[torch.device, Tensor] = {}
        step = cache.begin(self._new, None)
        if moves and not _like_the_next(step):
            cache.current = None
            raise UserError("the cache is not full, so that the next step differs")
        self._prepare(step)
        self._again = record(lambda: self._run(step))

    def step(self, tokens: Tensor) -> Tensor:
        """Feed each row's token `[rows]`; the logits."""
        if not self.moves:
            self._again()
            return self.logits
        self.tokens.copy_(tokens[:, None])
        step = self.cache.begin(self._new, None)
        if not _like_the_next(step):
            raise RuntimeError("The recorded step does not fit this cache any more.")
        self._keep_turned()
        self._again()
        self.cache._close(step)
        return self.logits

    def _run(self, step: Pass) -> None:
        """What is recorded."""
        step._made["query_positions", self.device].copy_(self.positions)
        step._made["following", self.device].copy_(self.positions[:, :, None] + 1)
        with _opened(self.cache, step):
            output = self.feeder.model(
                input_ids=self.tokens,
                position_ids=self.positions,
                use_cache=True,
                logits_to_keep=1,
                **{self.feeder._cache_argument: self.cache},
            )
        self.logits.copy_(output.logits[:, -1])
        if self.moves:
            self.positions.add_(1)

    def _prepare(self, step: Pass) -> None:
        """Make all that the host hands over in a step, before it is recorded."""
        for make in (step.query_positions, step.following, step.budgets, step.free_slots, step.cut_rows):
            make(self.device)
        self._keep_turned()

    def _keep_turned(self) -> None:
        """Put the sinks' keys, turned for this step, where the recorded step reads them."""
        shift = self.cache.shift
        if shift is None:
            return
        for device, turned in shift._turned.items():
            if device in self._turned:
                self._turned[device].copy_(turned)
            else:
                self._turned[device] = turned.clone()
        shift._turned = dict(self._turned)


def _like_the_next(step: Pass) -> bool:
    """Every row loses an entry, leaves a hole, and holds as much afterwards as before."""
    return (
        step.single
        and step.level
        and step.steady
        and step.holes
        and step.one_out
        and all(target is not None for target in step.targets)
    )


@contextmanager
def _opened(cache: EvictionCache, step: Pass) -> Iterator[None]:
    """The pass of the next forward pass has begun already: its first layer takes this one."""
    cache.begin = lambda new, real: step  # type: ignore[method-assign]
    try:
        yield
    finally:
        del cache.begin
