"""DistillCache's hybrid: what each KV head saw, against a dense pass with those masks, and what it comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_distillcache_weights import weights
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from twin_comparison import forward

from evictbench.cache.base import KVCache
from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.generation.fidelity import Text, evaluate
from evictbench.policies.distillcache import DistillCache, Settings
from evictbench.policies.distillcache.hybrid import entries_for_others
from evictbench.policies.full import Full
from evictbench.policy import ModelShape, Policy, Step
from evictbench.policy.budget import Budget
from twin.distillcache import random_ranker
from twin.tiny import random_tokens, tiny_model

LAYERS, KV_HEADS, GROUP = 5, 2, 2
PROMPT, QUESTION, NEW = 90, 6, 12
HEADS, FULL = LAYERS * KV_HEADS, LAYERS * KV_HEADS // 5


def small_model() -> Any:
    return tiny_model("qwen3", 3, layers=LAYERS, kv_heads=KV_HEADS, groups=GROUP)


class Watched(DistillCache):
    """Keeps what was hidden in every pass: layer, query positions, entry positions, `[kv_heads, slots]`; and the
    attention of the first pass after which something is lost, with what is lost."""

    def __init__(self) -> None:
        super().__init__(Settings(heads="hybrid"))
        self.use(weights(random_ranker(1)), ModelShape(LAYERS, KV_HEADS * GROUP, KV_HEADS, 16))
        self.masks: list[tuple[int, list[int], list[int], Tensor]] = []

    def head_mask(self, step: Step) -> Tensor:
        found = super().head_mask(step)
        self.masks.append((step.layer, step.query_positions[0].tolist(), step.positions[0, 0].tolist(), found[0]))
        return found


def read(model: Any, policy: Policy, budget: str | None, chunk: int, prefill: Any) -> tuple[Tensor, KVCache]:
    """A prompt in chunks, a question, token by token: all logits."""
    tokens = random_tokens(PROMPT + QUESTION + NEW, 5)
    cache = new_cache(model, policy, budget, prefill=prefill, prompt_length=PROMPT)
    out = [forward(model, cache, tokens[start : min(start + chunk, PROMPT)]) for start in range(0, PROMPT, chunk)]
    out.append(forward(model, cache, tokens[PROMPT : PROMPT + QUESTION]))
    out += [forward(model, cache, [token]) for token in tokens[PROMPT + QUESTION :]]
    return torch.cat(out), cache


def visibility(policy: Watched) -> Tensor:
    """`[layers, kv_heads, queries, tokens]` bool."""
    length = PROMPT + QUESTION + NEW
    visible = torch.ones(LAYERS, KV_HEADS, length, length, dtype=torch.bool).tril()
    for layer, queries, entries, hidden in policy.masks:
        for slot, entry in enumerate(entries):
            for query in queries if entry >= 0 else ():
                visible[layer, :, query, entry] &= ~hidden[:, slot]
    return visible


@pytest.mark.parametrize(("chunk", "prefill"), [(PROMPT, "native"), (13, "native"), (9, "bounded")])
@pytest.mark.parametrize("budget", ["25%", "50%"])
def test_heads_see_what_they_are_said_to_see(budget: str, chunk: int, prefill: Any) -> None:
    model, policy = small_model(), Watched()
    logits, cache = read(model, policy, budget, chunk, prefill)
    visible = visibility(policy)

    def masked(layer: int, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        mask = visible[layer].repeat_interleave(GROUP, 0)[None]
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)

    tokens = torch.tensor([random_tokens(PROMPT + QUESTION + NEW, 5)])
    with torch.no_grad():
        wanted = model(input_ids=tokens, dense_attention=masked, use_cache=False).logits[0]
    torch.testing.assert_close(logits, wanted, atol=1e-9, rtol=0)

    counts = visible.sum(-1).flatten(0, 1)
    occupancies = []
    for query in range(PROMPT + QUESTION, PROMPT + QUESTION + NEW):
        held = counts[:, query].tolist()
        allowed = Budget.parse(budget).at(PROMPT, query + 1)
        assert held.count(query + 1) == FULL
        assert len(set(held) - {query + 1}) == 1
        assert min(held) == (allowed * HEADS - (query + 1) * FULL) // (HEADS - FULL)
        occupancies.append(sum(held) / HEADS)
        assert allowed - 1 < occupancies[-1] <= allowed
        # The others share one set.
        sets = visible[:, :, query].flatten(0, 1)[torch.tensor(held) < query + 1]
        assert bool((sets == sets[0]).all())
    seen = cache.rows[0].occupancy
    assert seen.steps == NEW
    assert seen.total == pytest.approx(sum(occupancies))
    assert seen.largest == PROMPT + QUESTION + NEW


def test_the_heads_that_keep_everything_give_most_to_what_is_lost() -> None:
    model, policy = small_model(), Watched()
    read(model, policy, "50%", PROMPT, "native")
    lost = ~visibility(policy)[:, :, PROMPT, :PROMPT]
    chosen = ~lost.any(-1)
    given = torch.zeros(LAYERS, KV_HEADS)
    dropped = lost.flatten(0, 1).any(0)

    def watch(layer: int, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        logits = query @ key.repeat_interleave(GROUP, 1).transpose(-1, -2) * scaling
        future = torch.ones(PROMPT, PROMPT, dtype=torch.bool).triu(1)
        probs = logits.masked_fill(future, -torch.inf).softmax(-1)
        given[layer] = probs[0].sum(1)[:, dropped].sum(-1).view(KV_HEADS, GROUP).sum(-1).float()

    with torch.no_grad():
        model(input_ids=torch.tensor([random_tokens(PROMPT, 5)]), dense_attention=watch, use_cache=False)
    most = given.flatten().topk(FULL).indices.sort().values
    assert chosen.flatten().nonzero().flatten().tolist() == most.tolist()


def test_all_of_the_text_is_the_full_cache() -> None:
    model = small_model()
    ours, _ = read(model, Watched(), "100%", 13, "native")
    full, _ = read(model, Full(), None, 13, "native")
    torch.testing.assert_close(ours, full, atol=1e-9, rtol=0)


def test_rows_together_see_what_each_sees_alone() -> None:
    model, policy = small_model(), Watched()
    texts = [
        Text(row, tuple(random_tokens(40 + 17 * row, row)), tuple(random_tokens(4 + 3 * row, 100 + row)))
        for row in range(4)
    ]
    alone = evaluate(model, policy, Budget.parse("60%"), texts, batch_size=1)
    together = evaluate(model, policy, Budget.parse("60%"), texts, batch_size=3, chunk=11)
    for one, other in zip(alone, together, strict=True):
        assert one.metrics["kl"] > 1e-5
        assert [token.kl for token in one.divergence] == pytest.approx(
            [token.kl for token in other.divergence], abs=1e-7
        )


def test_places_of_the_others() -> None:
    """(r - .2) / .8 where a fifth of the heads is a whole number."""
    shape = ModelShape(5, 6, 3, 16)
    for held in (100, 1000, 4096):
        assert entries_for_others(held // 2, held, shape) == (held // 2 * 15 - 3 * held) // 12
    assert entries_for_others(250, 1000, shape) == pytest.approx((0.25 - 0.2) / 0.8 * 1000, abs=1)


@pytest.mark.parametrize("budget", ["20%", "5%", "64"])
def test_a_budget_that_leaves_nothing_is_refused(budget: str) -> None:
    with pytest.raises(UserError, match=f"takes 20% of the text: give a budget in percent above that, not {budget}"):
        new_cache(small_model(), Watched(), budget)


def test_the_two_options_exclude_each_other() -> None:
    with pytest.raises(UserError, match="leave out length=cache"):
        Settings(length="cache", heads="hybrid")
