"""Attention of one layer over its slots, and the signals that a policy reads from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from evictbench.cache.clock import ATTENTION, POLICY, SIGNALS
from evictbench.cache.kernels import attend_and_observe, attend_one, probabilities
from evictbench.cache.rope import SinkShift
from evictbench.policy.tiles import TILE_ELEMENTS

if TYPE_CHECKING:
    from evictbench.cache.clock import Clock
    from evictbench.cache.forward_plan import ForwardPlan
    from evictbench.cache.slots.layer import SlotLayer
    from evictbench.cache.softmax import Softmax
    from evictbench.policy.base import Policy
    from evictbench.policy.step import Step


@dataclass
class LayerAttention:
    """Attention of one layer in one forward pass.

    step: the layer as the policy sees it; its signals are filled in. query: `[rows, heads, new, head_dim]`. bias: 0
    where a query may see a slot and -inf elsewhere, `[rows or 1, sets or 1, new, slots]`; None: causality alone. shift:
    the sinks' shift, if they are seen at their distance in the cache. unread: nobody reads the output, which then
    need not be computed.
    """

    policy: Policy
    layer: SlotLayer
    plan: ForwardPlan
    step: Step
    query: Tensor
    softmax: Softmax
    bias: Tensor | None
    shift: SinkShift | None
    clock: Clock
    unread: bool = False
    decoded: Tensor | None = field(default=None, init=False)
    """In a pass of one token a row: the probabilities, if a signal needs them."""

    def run(self) -> Tensor:
        """The output, shaped like query; the declared signals are in `step.signals` then."""
        plan, step, query, wanted = self.plan, self.step, self.query, self.policy.signals
        device, signals = query.device, step.signals
        if self.policy.masks_heads and max(plan.before) > 0:
            masked = self.policy.head_mask(step)[:, :, None]
            bias = self.bias
            self.bias = additive(~masked, step.keys.dtype) if bias is None else bias.masked_fill(masked, -torch.inf)
        sinks = self._sink_queries()
        self.clock.lap(POLICY, device)
        if "window_probs" in wanted and (self.policy.window_in_decode or not plan.decodes):
            self.layer.remember_queries(query, self.policy.window)
            self.clock.lap(SIGNALS, device)
            signals.window_probs = self.clock.timed(self.window_probs, device)
        output = self._attend(sinks)
        self.clock.lap(ATTENTION, device)
        if "last_query_probs" in wanted and plan.cuts and not plan.single:
            last = None if self.bias is None else self.bias[:, :, -1:]
            probs = probabilities(query[:, :, -1:], step.keys, last, self.softmax)
            signals.last_query_probs = probs[:, :, :, 0]
            self.clock.lap(SIGNALS, device)
        if "recent_probs" in wanted:
            signals.recent_probs = self.clock.timed(self.recent_probs, device)
        return output

    def _attend(self, sinks: tuple[int, Tensor] | None) -> Tensor:
        plan, step, query, bias, softmax = self.plan, self.step, self.query, self.bias, self.softmax
        wanted, signals = self.policy.signals, step.signals
        reads_decode = "mass" in wanted or "recent_probs" in wanted or ("last_query_probs" in wanted and plan.cuts)
        if plan.single and reads_decode:
            output, probs = attend_one(query, step.keys, step.values, bias, softmax)
            self.decoded = probs
            for name in wanted & {"mass", "last_query_probs"}:
                setattr(signals, name, probs)
            return output
        if self.unread and "mass" not in wanted and sinks is None:
            return query
        if "mass" in wanted or sinks is not None or not softmax.plain:
            output, signals.mass = attend_and_observe(
                query,
                step.keys,
                step.values,
                bias,
                softmax,
                sinks=sinks,
                causal_from=max(plan.before) if plan.level else None,
                observe="mass" in wanted,
                real=None if plan.real is None else plan.real.to(query.device),
            )
            return output
        # A bias per kept set becomes one per query head; a first chunk needs none but causality.
        mask = bias if bias is None or bias.shape[1] == 1 else bias.repeat_interleave(step.shape.group, dim=1)
        causal = bias is None and not plan.single
        return F.scaled_dot_product_attention(
            query, step.keys, step.values, attn_mask=mask, is_causal=causal, scale=softmax.scaling, enable_gqa=True
        )

    def _sink_queries(self) -> tuple[int, Tensor] | None:
        """In a chunk: the number of sinks, and the queries rotated to their distance from them in the cache."""
        plan, query = self.plan, self.query
        rotation = None if self.shift is None else self.shift.rotations[self.layer.index]
        if rotation is None or plan.dense or plan.single:
            return None
        if all(seen <= entries[-2] for seen, entries in zip(plan.seen, plan.entries, strict=True)):
            return None
        positions, budgets = plan.query_positions(query.device), plan.budgets(query.device)[:, :-1]
        shift = (positions - (budgets - 1)).clamp(min=0)
        return self.policy.sinks, rotation.turn(query, -shift[:, None])

    def window_probs(self) -> Tensor:
        """The signal of that name: softmax rows of the remembered queries over what is held."""
        plan, step = self.plan, self.step
        queries = self.layer.last_queries
        assert queries is not None
        window, device = queries.shape[2], step.keys.device
        back = torch.arange(window - 1, -1, -1, device=device)
        positions = plan.following(device)[:, :, 0] - 1 - back
        visible = (step.positions[:, :, None] <= positions[:, None, :, None]) & (step.positions[:, :, None] >= 0)
        exists = positions >= 0
        visible = visible | ~exists[:, None, :, None]
        probs = probabilities(queries[: plan.rows], step.keys, additive(visible, step.keys.dtype), self.softmax)
        return probs * exists[:, None, None, :, None]

    def recent_probs(self, count: int, before: int = 0) -> Tensor:
        """The signal of that name: softmax rows of the `count` queries of this pass in front of its last `before`."""
        plan, step, query = self.plan, self.step, self.query
        rows, heads, queries, _ = query.shape
        decoded = self.decoded
        wide = torch.promote_types(query.dtype, torch.float32)
        slots, kv_heads, device = plan.used, step.keys.shape[1], query.device
        if decoded is not None and count == 1 and before == 0:
            return decoded[:, :, :, None]
        result = torch.zeros((rows, kv_heads, heads // kv_heads, count, slots), dtype=wide, device=device)
        end, missing = queries - before, count - (queries - before)
        tile = max(1, TILE_ELEMENTS.get(device.type, 2**22) // max(1, rows * heads * slots))
        for first in range(max(0, -missing), end, tile):
            last = min(end, first + tile)
            if decoded is not None:
                probs = decoded[:, :, :, None]
            else:
                bias = self.bias[:, :, first:last] if self.bias is not None else None
                if bias is None:
                    causal = torch.arange(slots, device=device) <= torch.arange(first, last, device=device)[:, None]
                    bias = additive(causal[None, None], step.keys.dtype)
                probs = probabilities(query[:, :, first:last], step.keys, bias, self.softmax)
            if plan.real is not None:
                probs = probs * plan.real.to(device)[:, None, None, first:last, None]
            result[:, :, :, first + missing : last + missing] = probs
        return result


def visibility(plan: ForwardPlan, step: Step, expiry: Tensor | None, shared: bool) -> Tensor | None:
    """0 where a query may see a slot and -inf elsewhere, in the keys' dtype: `[rows or 1, sets or 1, new, slots]`.

    expiry: of each slot, `[rows, sets, slots]`, where the policy is static and entries expire within the pass. shared:
    all layers share it. None is returned for one query a row that sees every slot in use, and for a first chunk, which
    the causal kernel serves.
    """
    device, dtype = step.keys.device, step.keys.dtype
    if expiry is not None:
        expiry_here = expiry.to(device)

        def with_expiry() -> Tensor:
            visible = step.query_positions[:, None, :, None] < expiry_here[:, :, None, :]
            return additive(_causal(plan, device) & visible, dtype)

        return plan.once("bias", device, with_expiry) if shared else with_expiry()
    if plan.level and (plan.single or max(plan.before) == 0):
        return None
    return plan.once("bias", device, lambda: additive(_causal(plan, device), dtype))


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `visible` is true and -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _causal(plan: ForwardPlan, device: torch.device) -> Tensor:
    """A slot is seen if it was filled before, or by this query or an earlier one of the pass.

    `[rows or 1, 1, new, slots]` bool. Padding sees what its row's first token sees, so that no softmax is empty.
    """
    slots = torch.arange(plan.used, device=device)
    if plan.level:
        last = max(plan.before) + torch.arange(plan.queries, device=device)[None]
    else:
        before = torch.tensor(plan.before, device=device)[:, None]
        real = torch.ones((plan.rows, plan.queries), dtype=torch.bool, device=device)
        real = real if plan.real is None else plan.real.to(device)
        last = before + (real.cumsum(-1) - 1).clamp(min=0)
    return slots <= last[:, None, :, None]
