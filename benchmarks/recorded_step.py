"""A decode step that is recorded once and repeated: the same kernels on the same tensors, without Python between them.

Once a cache of slots is full, every step has the same shapes: a slot is overwritten, `budget` slots attend, one entry
is evicted. Position, token and the sinks' rotated keys differ from step to step; they are kept in tensors that are
written before each repetition. All other numbers of the host stay as they were recorded. Only the device knows which
slot is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.slots.cache import SlotCache
from evictbench.errors import UserError

if TYPE_CHECKING:
    from evictbench.cache.base import KVCache
    from evictbench.cache.forward_plan import ForwardPlan
    from evictbench.generation.runner import ModelRunner

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""A function that runs something once and records it; the function that it returns does the same again."""

WARM_STEPS = 3
"""Ordinary steps before one is recorded: the first ones free no slot, load kernels and make workspaces."""


def cuda_graph(run: Callable[[], None]) -> Callable[[], None]:
    """Record a CUDA graph. Nothing runs while it is recorded, so that the first repetition is the step itself."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    again: Callable[[], None] = graph.replay
    return again


class RecordedStep:
    """One step of all rows of a cache that has made WARM_STEPS ordinary ones.

    tokens: `[rows]`, fed in the step that is recorded. moves: each repetition is the next step; False: each repeats the
    same step at the same position, which is all that a growing cache can do.
    logits: `[rows, vocabulary]`, of the last step, overwritten by the next. Raises UserError where steps differ.
    """

    def __init__(
        self, runner: ModelRunner, cache: KVCache, tokens: Tensor, record: Record = cuda_graph, moves: bool = True
    ) -> None:
        if not isinstance(cache, SlotCache):
            raise UserError("pages change hands between steps")
        self.runner, self.cache, self.moves = runner, cache, moves
        rows, keys = len(cache.rows), cache.evicting[0].buffers["keys"]
        self.device = keys.device
        self._new_keys = keys[:rows, :, :1]
        self.tokens = tokens.to(self.device).view(-1, 1).clone()
        self.positions = torch.tensor(cache.seen, device=self.device)[:, None]
        vocabulary = runner.model.config.get_text_config(decoder=True).vocab_size
        self.logits = torch.empty((rows, vocabulary), dtype=runner.model.dtype, device=self.device)
        self._rotated_sinks: dict[torch.device, Tensor] = {}
        plan = cache.begin(None, self._new_keys, None)
        if moves and not _repeats(plan):
            cache.current = None
            raise UserError("the cache is not full, so that the next step differs")
        self._prepare(plan)
        self._again = record(lambda: self._run(plan))

    def step(self, tokens: Tensor) -> Tensor:
        """Feed each row's token `[rows]`; returns the logits."""
        if not self.moves:
            self._again()
            return self.logits
        self.tokens.copy_(tokens[:, None])
        plan = self.cache.begin(None, self._new_keys, None)
        if not _repeats(plan):
            raise RuntimeError("The recorded step does not fit this cache any more.")
        self._keep_rotated_sinks()
        self._again()
        self.cache.close(plan)
        return self.logits

    def _run(self, plan: ForwardPlan) -> None:
        """The step that is recorded."""
        plan.query_positions(self.device).copy_(self.positions)
        plan.following(self.device).copy_(self.positions[:, :, None] + 1)
        with _begun(self.cache, plan):
            output = self.runner.model(
                input_ids=self.tokens,
                position_ids=self.positions,
                use_cache=True,
                logits_to_keep=1,
                **{self.runner.cache_argument: self.cache},
            )
        self.logits.copy_(output.logits[:, -1])
        if self.moves:
            self.positions.add_(1)

    def _prepare(self, plan: ForwardPlan) -> None:
        """Make every tensor of a plan that comes from numbers on the host, before the step is recorded."""
        for make in (plan.query_positions, plan.following, plan.budgets, plan.free_slots, plan.cut_rows):
            make(self.device)
        self._keep_rotated_sinks()

    def _keep_rotated_sinks(self) -> None:
        """Put the sinks' keys, rotated for this step, where the recorded step reads them."""
        shift = self.cache.shift
        if shift is None:
            return
        for device, rotated in shift._rotated.items():
            if device in self._rotated_sinks:
                self._rotated_sinks[device].copy_(rotated)
            else:
                self._rotated_sinks[device] = rotated.clone()
        shift._rotated = dict(self._rotated_sinks)


def _repeats(plan: ForwardPlan) -> bool:
    """Whether every row loses one entry, whose slot the next token takes, and holds as many entries afterwards."""
    return (
        plan.single
        and plan.level
        and plan.steady
        and plan.freed_slots
        and plan.one_out
        and all(target is not None for target in plan.targets)
    )


@contextmanager
def _begun(cache: SlotCache, plan: ForwardPlan) -> Iterator[None]:
    """The next forward pass has begun already: its first layer takes this plan."""
    cache.begin = lambda module, keys, real: plan  # type: ignore[method-assign]
    try:
        yield
    finally:
        del cache.begin
