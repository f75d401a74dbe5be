"""Checks of one model family, built in small with random weights in float64: the cache against transformers' own.

The other side of every comparison is the model with transformers' `DynamicCache` and its own sdpa attention. Where a
policy evicts, nothing is taken out of that cache: a mask hides what the policy's definition drops.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evictbench import registry
from evictbench.cache.new_cache import new_cache
from evictbench.cache.probe import cache_argument
from evictbench.cache.rope import rotations
from evictbench.errors import UserError
from evictbench.policy import ModelShape
from studies.family_sizes import VOCABULARY, small_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH = 42
PROMPT = 36
BUDGET = 20
STEPS = 3
SINKS = 4
SNAPKV_WINDOW = 4

TOLERANCE = 1e-4
"""The largest difference of two logits that passes. Some families compute their angles in float32 whatever the
dtype of the model, and a key that is turned twice then is not quite a key that is turned once."""


class Failed(Exception):
    """A check that failed, in words."""


def build(family: str, **settings: Any) -> PreTrainedModel:
    """The family in small, in float64, with random weights of a size at which attention is neither flat nor one-hot."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = small_config(family, **settings)
    config._experts_implementation = "eager"  # the other kernels know no float64
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1 if "embed" in name else weight.shape[-1] ** -0.5 * 1.5)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    built: PreTrainedModel = model
    return built


@dataclass
class Reference:
    """transformers' own attention over its own cache, under a mask of each layer.

    visible: of each layer, `[kv_heads or 1, queries, keys]` bool; a layer that is not there sees all that came before.
    probs: of each layer in the last pass, `[heads, queries, keys]`.
    """

    visible: dict[int, Tensor] = field(default_factory=dict)
    probs: dict[int, Tensor] = field(default_factory=dict)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **named: Any
    ) -> tuple[Tensor, None]:
        """Attention by its definition, with this object's mask in place of the model's where there is one."""
        heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
        seen = self.visible.get(module.layer_idx)
        if seen is None and mask is not None:
            seen = mask[0]
        if seen is None:
            seen = torch.ones(1, queries, keys, dtype=torch.bool).tril(keys - queries)
        seen = seen.repeat_interleave(heads // seen.shape[0], dim=0)
        scaling, softcap, sinks = named.get("scaling"), named.get("softcap"), named.get("s_aux")
        group = heads // key.shape[1]
        logits = query[0] @ key[0].repeat_interleave(group, dim=0).mT
        logits = logits * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks.to(logits.dtype)[:, None, None].expand(-1, queries, 1)], -1)
        probs = logits.softmax(-1)[..., :keys]
        self.probs[module.layer_idx] = probs
        output = probs @ value[0].repeat_interleave(group, dim=0)
        return output.transpose(0, 1)[None], None


@cache
def text(length: int, seed: int = 0) -> Tensor:
    """Random tokens `[1, length]`."""
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def forward(model: Any, ids: Tensor, start: int, past: Any, mask: Tensor | None = None) -> Tensor:
    """Logits `[rows, tokens, vocabulary]` of tokens whose first stands at `start`."""
    named: dict[str, Any] = {cache_argument(model): past, "use_cache": True}
    if "position_ids" in inspect.signature(model.forward).parameters:
        positions = start + torch.arange(ids.shape[1]).expand_as(ids)
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        named["position_ids"] = positions
    if mask is not None:
        named["attention_mask"] = mask
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, **named).logits
    return logits


def plain(model: Any, ids: Tensor, prompt: int = PROMPT, chunk: int = LENGTH) -> Tensor:
    """Logits of a text by transformers alone: its prompt in chunks, by default in one, and the rest token by token."""
    from transformers import DynamicCache

    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    past = DynamicCache(config=model.config)
    bounds = [*range(0, prompt, chunk), *range(prompt, ids.shape[1] + 1)]
    parts = [forward(model, ids[:, start:stop], start, past) for start, stop in itertools.pairwise(bounds)]
    return torch.cat(parts, 1)


@dataclass
class Ours:
    """A text through our cache. logits: of every token. kept: of each layer by tokens seen, positions per KV head."""

    logits: Tensor
    kept: dict[int, list[Tensor]]


def ours(model: Any, policy: str, ids: Tensor, budget: int | None, chunk: int, prompt: int = PROMPT) -> Ours:
    """A text under a policy: its prompt in chunks, and the rest token by token."""
    chosen = registry.parse_policy(policy)
    made: Any = chosen.policy(chosen.config)
    made.minimum_budget = lambda shape: 1
    past = new_cache(model, made, budget, prompt_length=prompt)
    bounds = [*range(0, prompt, chunk), *range(prompt, ids.shape[1] + 1)]
    parts, kept = [], {}
    for start, stop in itertools.pairwise(bounds):
        parts.append(forward(model, ids[:, start:stop], start, past))
        layers = range(past.shape.layers)
        kept[stop] = [past.kept(layer).expand(past.shape.kv_heads, -1) for layer in layers]
    return Ours(torch.cat(parts, 1), kept)


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two logits. Raises Failed above the tolerance, and for what is no number."""
    largest = float((one - other).abs().max())
    if not largest <= TOLERANCE:
        raise Failed(f"logits differ by {largest:.2g}")
    return largest


def sinks_and_window(model: Any) -> str:
    """StreamingLLM as published, or with original positions on a model whose keys cannot be moved."""
    try:
        rotations(model, "streaming_llm")
    except UserError:
        return "streaming_llm:positions=original"
    return "streaming_llm"


def full_budget(model: Any) -> float:
    """A budget of the whole text equals transformers' own cache, read in the same chunks: linear attention computes in
    float32 and by chunks, so that transformers alone gives other logits in other ones."""
    ids = text(LENGTH)
    if float(plain(model, ids).std()) < 1e-3:
        raise Failed("the logits of the small model are all alike")
    return max(
        difference(ours(model, policy, ids, budget, chunk).logits, plain(model, ids, chunk=chunk))
        for policy, budget, chunk in (
            ("full", None, 32),
            ("h2o", LENGTH + 1, 16),
            (sinks_and_window(model), LENGTH + 1, 512),
        )
    )


def padded_row(model: Any) -> float:
    """A row that is padded on the left equals the same text alone."""
    largest = 0.0
    short, long = text(30, seed=1), text(PROMPT)
    ids = torch.cat([torch.cat([torch.zeros(1, PROMPT - 30, dtype=torch.long), short], 1), long])
    for policy, budget in (("full", None), (sinks_and_window(model), BUDGET), ("h2o", BUDGET)):
        chosen = registry.parse_policy(policy)
        alone = ours(model, policy, torch.cat([short, text(STEPS, seed=2)], 1), budget, 512, prompt=30).logits[:, 29:]
        past = new_cache(model, chosen.policy(chosen.config), budget, prompt_length=PROMPT)
        mask = (torch.arange(PROMPT) >= torch.tensor([[PROMPT - 30], [0]])).long()
        parts = [forward(model, ids, 0, past, mask)[:, -1:]]
        for at in range(STEPS):
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            parts.append(forward(model, text(STEPS, seed=2)[:, at : at + 1].expand(2, 1), PROMPT + at, past, mask))
        largest = max(largest, difference(torch.cat(parts, 1)[:1], alone))
    return largest


def chunks(model: Any) -> float:
    """Chunks of 32 and of 512 agree."""
    ids = text(LENGTH)
    return max(
        difference(*(ours(model, policy, ids, budget, chunk).logits[:, PROMPT - 1 :] for chunk in (32, 512)))
        for policy, budget in (
            ("full", None),
            (sinks_and_window(model), BUDGET),
            ("random:recent=4", BUDGET),
            ("h2o", BUDGET),
        )
    )


def streaming(model: Any, positions: str) -> float:
    """StreamingLLM against transformers' cache, one token at a time. Where its positions are those in the cache, the
    sinks' keys are put there that the model computes for the sinks alone at those positions."""
    from transformers import DynamicCache

    ids = text(LENGTH)
    mine = ours(model, f"streaming_llm:positions={positions}", ids, BUDGET, 16).logits
    reference, past = _use(model), DynamicCache(config=model.config)
    logits = [forward(model, ids[:, :BUDGET], 0, past)]
    for at in range(BUDGET, LENGTH):
        shift = at - BUDGET + 1
        if positions == "reindexed":
            reference.visible = {}
            moved = DynamicCache(config=model.config)
            forward(model, ids[:, :SINKS], shift, moved)
            for layer in _evicting(model):
                sinks: Any = moved.layers[layer]
                held: Any = past.layers[layer]
                held.keys[:, :, :SINKS] = sinks.keys
        seen = (torch.arange(at + 1) < SINKS) | (torch.arange(at + 1) > at - (BUDGET - SINKS))
        reference.visible = dict.fromkeys(_evicting(model), seen[None, None])
        logits.append(forward(model, ids[:, at : at + 1], at, past))
    return difference(mine, torch.cat(logits, 1))


def by_attention(model: Any, policy: str, cut: Callable[[_Told], list[int]]) -> float:
    """A policy that reads attention, against its definition on the probabilities of transformers' cache: the prompt is
    attended to whole, and cut at its end and after every token that follows."""
    from transformers import DynamicCache

    ids = text(LENGTH)
    mine = ours(model, policy, ids, BUDGET, 512)
    reference, past = _use(model), DynamicCache(config=model.config)
    logits = [forward(model, ids[:, :PROMPT], 0, past)]
    layers, kv_heads = _evicting(model), ModelShape.of(model.config).kv_heads
    held = {(layer, head): list(range(PROMPT)) for layer in layers for head in range(kv_heads)}
    mass: dict[int, Tensor] = {layer: torch.zeros(0) for layer in layers}
    for seen in range(PROMPT, LENGTH + 1):
        for index, layer in enumerate(layers):
            probs = reference.probs[layer].unflatten(0, (kv_heads, -1))
            received = probs.sum(-2)
            received[..., : mass[layer].shape[-1]] += mass[layer]
            mass[layer] = received
            for head in range(kv_heads):
                told = _Told(head, held[layer, head], seen, probs, received)
                held[layer, head] = cut(told)
                if held[layer, head] != mine.kept[seen][index][head].tolist():
                    raise Failed(f"layer {layer}, KV head {head}, {seen} tokens: other entries are kept")
        if seen == LENGTH:
            break
        reference.visible = {}
        for layer in layers:
            visible = torch.zeros(kv_heads, 1, seen + 1, dtype=torch.bool)
            for head in range(kv_heads):
                visible[head, 0, [*held[layer, head], seen]] = True
                held[layer, head] = [*held[layer, head], seen]
            reference.visible[layer] = visible
        logits.append(forward(model, ids[:, seen : seen + 1], seen, past))
    return difference(mine.logits, torch.cat(logits, 1))


@dataclass
class _Told:
    """What a definition is told of one KV head. probs: `[kv_heads, group, queries, keys]` of the last pass. mass:
    `[kv_heads, group, keys]`, all that each key has received."""

    head: int
    held: list[int]
    seen: int
    probs: Tensor
    mass: Tensor


def _best(scores: Tensor, among: list[int], count: int) -> list[int]:
    return sorted(sorted(among, key=lambda position: (-float(scores[position]), position))[:count])


def tova(told: _Told) -> list[int]:
    """What the layer's last query attends to most, the mean over its heads."""
    if len(told.held) < BUDGET:
        return told.held
    return _best(told.probs[:, :, -1].mean((0, 1)), told.held, BUDGET - 1)


def h2o(told: _Told) -> list[int]:
    """Half of the budget recent, the next query included; the rest by all attention received, the mean of a group."""
    if len(told.held) < BUDGET:
        return told.held
    recent = [position for position in told.held if position > told.seen - BUDGET // 2]
    rest = [position for position in told.held if position not in recent]
    return sorted(_best(told.mass[told.head].mean(0), rest, BUDGET - 1 - len(recent)) + recent)


def snapkv(told: _Told) -> list[int]:
    """The prompt is cut once: its last queries vote, smoothed by the largest of three neighbours, and stay."""
    if told.seen > PROMPT:
        return told.held
    votes = told.probs[told.head][:, -SNAPKV_WINDOW:].sum(1).mean(0)
    prefix, window = told.held[:-SNAPKV_WINDOW], told.held[-SNAPKV_WINDOW:]
    pooled = torch.stack([votes[max(0, at - 1) : min(len(prefix), at + 2)].max() for at in prefix])
    return _best(pooled, prefix, BUDGET - SNAPKV_WINDOW) + window


CHECKS: dict[str, Callable[[Any], float]] = {
    "full": full_budget,
    "padded": padded_row,
    "chunks": chunks,
    "streaming_llm": lambda model: streaming(model, "reindexed"),
    "original positions": lambda model: streaming(model, "original"),
    "tova": lambda model: by_attention(model, "tova", tova),
    "h2o": lambda model: by_attention(model, "h2o", h2o),
    "snapkv": lambda model: by_attention(model, f"snapkv:window={SNAPKV_WINDOW},kernel=3", snapkv),
}
"""The checks of a family by name. Each returns the largest difference of two logits, and raises what goes wrong."""


def _use(model: Any) -> Reference:
    """Set a model's attention to a reference of its own."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    reference = Reference()
    AttentionInterface.register("family_reference", reference.attend)
    AttentionMaskInterface.register("family_reference", sdpa_mask)
    model.set_attn_implementation("family_reference")
    return reference


def _evicting(model: Any) -> list[int]:
    """The numbers of the layers that evict."""
    shape = ModelShape.of(model.config)
    return [shape.number(layer) for layer in range(shape.layers)]
