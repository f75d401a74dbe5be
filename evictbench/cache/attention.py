"""The attention function: write, attend, show the policy what it asked for, evict.

Registered with transformers under the name "evictbench"; the model's own code calls it in every layer. What the
model passes as keys are the new ones, and they carry the cache layer; without one, this is plain causal attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from evictbench.cache.clock import ATTENTION, POLICY, REST, SIGNALS
from evictbench.cache.kernels import TILE_ELEMENTS, attend_and_observe, attend_one, probabilities
from evictbench.cache.paged.cache import PagedLayer
from evictbench.cache.rope import rotate
from evictbench.policy.step import Entering, Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.forward_plan import Pass
    from evictbench.cache.slots.cache import EvictionCache
    from evictbench.cache.slots.layer import SlotLayer

NAME = "evictbench"

DenseAttention = Callable[[int, torch.nn.Module, Tensor, Tensor, Tensor, float], Tensor | None]
"""A pass's own attention where there is no cache, given to the model as `dense_attention=`: (layer, module, query,
key, value, scaling) to the output `[rows, heads, queries, head_dim]`; None for the plain causal one."""


def use(model: PreTrainedModel) -> None:
    """Make a model attend through this module."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if model.config._attn_implementation != NAME:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, new_token_mask)
        model.set_attn_implementation(NAME)


def new_token_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Which of the new tokens are real, `[rows, queries]` bool; causality and slots are the cache's to enforce."""
    if attention_mask is None:
        return None
    queries = kwargs.get("q_length")
    if queries is None:
        queries = kwargs["cache_position"].shape[0]
    return attention_mask[:, -queries:].bool()


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer. query `[rows, heads, queries, head_dim]`, key and value `[rows, kv_heads, queries,
    head_dim]`, the new ones only; returns `[rows, queries, heads, head_dim]`. Without a cache, `dense_attention` in
    the model's keyword arguments stands in for plain causal attention."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: SlotLayer | None = getattr(key, "slots", None)
    if layer is None:
        own: DenseAttention | None = kwargs.get("dense_attention")
        output = None if own is None else own(cast(int, module.layer_idx), module, query, key, value, scaling)
        if output is not None:
            return output.transpose(1, 2), None
        return _without_cache(query, key, value, attention_mask, scaling), None
    layer.awaits_attention = False
    cache = layer.cache
    if cache.clock is not None:
        cache.clock.lap(REST, query.device)
    if isinstance(layer, PagedLayer):
        return layer.cache.attend(layer, query, key, value, attention_mask, scaling).transpose(1, 2), None
    step = cache.begin(key, attention_mask) if layer.index == 0 else cache.current
    assert step is not None
    view = _view(layer, step, cache.write(layer, key, value, step))
    if not step.settles:
        cache.policy.prepare(view)
    output = _attend(layer, step, view, query, scaling)
    cache.finish(layer, step, view)
    if cache.clock is not None:
        cache.clock.lap(POLICY, query.device)
    return output.transpose(1, 2), None


def _view(layer: SlotLayer, step: Pass, entered: Entering) -> Step:
    """What a policy may see of this layer."""
    cache = layer.cache
    keys = step.front(layer.buffers["keys"])
    placement = cache.placement(layer.index)
    shared = {name: step.front(tensor) for name, tensor in placement.state.items()}
    shared |= {name: memory[: step.rows] for name, memory in placement.memory.items()}

    def place(name: str, value: Tensor) -> None:
        buffers = layer.buffers if name in layer.buffers else placement.state
        step.put(buffers[name], value, placement.free.to(buffers[name].device))

    return Step(
        layer=layer.index,
        shape=cache.shape,
        positions=step.front(placement.positions).to(keys.device),
        keys=keys,
        values=step.front(layer.buffers["values"]),
        state={name: step.front(layer.buffers[name]) for name in cache.slot_tensors if name in layer.buffers},
        memory={name: memory[: step.rows] for name, memory in layer.memory.items()},
        entered=entered,
        place=place,
        query_positions=step.query_positions(keys.device),
        budgets=step.budgets(keys.device),
        steady=step.steady,
        shared=shared,
        carried=step.carried,
        dense=step.dense,
        ends_prompt=step.ends_prompt,
        cuts=step.cuts,
    )


def _attend(layer: SlotLayer, step: Pass, view: Step, query: Tensor, scaling: float) -> Tensor:
    """The output `[rows, heads, queries, head_dim]`, and the declared signals into `view`."""
    cache, wanted = layer.cache, layer.cache.policy.signals
    bias = _bias(cache, layer, step, view)
    if cache.policy.hides and max(step.before) > 0:
        hidden = cache.policy.hidden(view)[:, :, None]
        bias = _additive(~hidden, view.keys.dtype) if bias is None else bias.masked_fill(hidden, -torch.inf)
    sinks = _shifted_queries(cache, step, query)
    if cache.clock is not None:
        cache.clock.lap(POLICY, query.device)
    if "window_probs" in wanted and (cache.policy.guarded or not cache.prompt_done):
        layer.remember_queries(query, cache.policy.window)
        view.signals.window_probs = lambda: _window_probs(layer, step, view, scaling)
        if cache.clock is not None:
            cache.clock.lap(SIGNALS, query.device)
            view.signals.window_probs = cache.clock.asked(view.signals.window_probs, query.device)
    shows_mass = "mass" in wanted
    if step.single and (shows_mass or "recent_probs" in wanted or ("last_query_probs" in wanted and step.cuts)):
        output, mass = attend_one(query, view.keys, view.values, bias, scaling)
        view.signals.mass = view.signals.last_query_probs = mass
    elif shows_mass or sinks is not None:
        output, view.signals.mass = attend_and_observe(
            query,
            view.keys,
            view.values,
            bias,
            scaling,
            sinks=sinks,
            causal_from=max(step.before) if step.level else None,
            observe=shows_mass,
            real=None if step.real is None else step.real.to(query.device),
        )
    elif cache.output_unread:
        output = query
    else:
        # A bias per kept set becomes one per query head; a first chunk needs none but causality.
        mask = bias if bias is None or bias.shape[1] == 1 else bias.repeat_interleave(cache.shape.group, dim=1)
        causal = bias is None and not step.single
        output = F.scaled_dot_product_attention(
            query, view.keys, view.values, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True
        )
    if cache.clock is not None:
        cache.clock.lap(ATTENTION, query.device)
    if "last_query_probs" in wanted and step.cuts and not step.single:
        last = None if bias is None else bias[:, :, -1:]
        view.signals.last_query_probs = probabilities(query[:, :, -1:], view.keys, last, scaling)[:, :, :, 0]
        if cache.clock is not None:
            cache.clock.lap(SIGNALS, query.device)
    if "recent_probs" in wanted:
        view.signals.recent_probs = partial(_recent_probs, step, view, query, bias, scaling)
        if cache.clock is not None:
            view.signals.recent_probs = cache.clock.asked(view.signals.recent_probs, query.device)
    return output


def _bias(cache: EvictionCache, layer: SlotLayer, step: Pass, view: Step) -> Tensor | None:
    """0 where a query may see a slot and -inf elsewhere, `[rows or 1, sets or 1, queries, used]`, in the keys' dtype.

    None: one query a row that sees every slot in use, or a first chunk, where the plain causal kernel does.
    """
    device = view.keys.device
    placement = cache.placement(layer.index)
    if cache.policy.static and step.cuts and not step.dense and not step.single:
        if placement not in step.deadlines:
            step.deadlines[placement] = cache.policy.deadlines(view)
        deadlines = step.deadlines[placement].to(device)

        def with_deadlines() -> Tensor:
            alive = view.query_positions[:, None, :, None] < deadlines[:, :, None, :]
            return _additive(_causal(step, device) & alive, view.keys.dtype)

        shared = len(cache.placements) == 1
        return step.once("bias", device, with_deadlines) if shared else with_deadlines()
    if step.level and (step.single or max(step.before) == 0):
        return None
    return step.once("bias", device, lambda: _additive(_causal(step, device), view.keys.dtype))


def _causal(step: Pass, device: torch.device) -> Tensor:
    """A slot is seen if it was filled before, or by this query or an earlier one of the pass.

    `[rows or 1, 1, queries, used]` bool. Padding sees what its row's first token sees, so that no softmax is empty.
    """
    slots = torch.arange(step.used, device=device)
    if step.level:
        last = max(step.before) + torch.arange(step.queries, device=device)[None]
    else:
        before = torch.tensor(step.before, device=device)[:, None]
        real = torch.ones((step.rows, step.queries), dtype=torch.bool, device=device)
        real = real if step.real is None else step.real.to(device)
        last = before + (real.cumsum(-1) - 1).clamp(min=0)
    return slots <= last[:, None, :, None]


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _shifted_queries(cache: EvictionCache, step: Pass, query: Tensor) -> tuple[int, Tensor] | None:
    """In a chunk: how many sinks lie in front, and the queries turned back to see them at their in-cache distance."""
    if cache.shift is None or step.dense or step.single:
        return None
    if all(seen <= entries[-2] for seen, entries in zip(step.seen, step.entries, strict=True)):
        return None
    positions, budgets = step.query_positions(query.device), step.budgets(query.device)[:, :-1]
    shift = (positions - (budgets - 1)).clamp(min=0)
    turned = rotate(query, -shift[:, None], cache.shift.frequencies(query.device))
    return cache.policy.sinks, turned


def _window_probs(layer: SlotLayer, step: Pass, view: Step, scaling: float) -> Tensor:
    """Softmax rows of the ring's queries over what is held, zero for queries not yet seen."""
    assert layer.ring is not None
    window, device = layer.ring.shape[2], view.keys.device
    back = torch.arange(window - 1, -1, -1, device=device)
    positions = step.following(device)[:, :, 0] - 1 - back
    visible = (view.positions[:, :, None] <= positions[:, None, :, None]) & (view.positions[:, :, None] >= 0)
    asked = positions >= 0
    visible = visible | ~asked[:, None, :, None]
    probs = probabilities(layer.ring[: step.rows], view.keys, _additive(visible, view.keys.dtype), scaling)
    return probs * asked[:, None, None, :, None]


def _recent_probs(
    step: Pass, view: Step, query: Tensor, bias: Tensor | None, scaling: float, count: int, before: int = 0
) -> Tensor:
    """Softmax rows of the `count` queries of this pass in front of its last `before`, zero where there are none."""
    rows, heads, queries, _ = query.shape
    row = view.signals.mass if step.single else None
    wide = torch.promote_types(query.dtype, torch.float32)
    slots, kv_heads, device = step.used, view.keys.shape[1], query.device
    if row is not None and count == 1 and before == 0:
        return row[:, :, :, None]
    found = torch.zeros((rows, kv_heads, heads // kv_heads, count, slots), dtype=wide, device=device)
    end, missing = queries - before, count - (queries - before)
    tile = max(1, TILE_ELEMENTS.get(device.type, 2**22) // max(1, rows * heads * slots))
    for first in range(max(0, -missing), end, tile):
        last = min(end, first + tile)
        if row is not None:
            probs = row[:, :, :, None]
        else:
            seen = bias[:, :, first:last] if bias is not None else None
            if seen is None:
                visible = torch.arange(slots, device=device) <= torch.arange(first, last, device=device)[:, None]
                seen = _additive(visible[None, None], view.keys.dtype)
            probs = probabilities(query[:, :, first:last], view.keys, seen, scaling)
        if step.real is not None:
            probs = probs * step.real.to(device)[:, None, None, first:last, None]
        found[:, :, :, first + missing : last + missing] = probs
    return found


def _without_cache(query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scaling: float) -> Tensor:
    """Plain causal attention over one padded batch, as a teacher's forward pass needs."""
    if real is None or bool(real.all()):
        mask = None
    else:
        queries = query.shape[2]
        causal = torch.ones(queries, queries, dtype=torch.bool, device=query.device).tril()
        itself = torch.eye(queries, dtype=torch.bool, device=query.device)
        mask = (causal & real[:, None, None, :]) | itself
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2)
