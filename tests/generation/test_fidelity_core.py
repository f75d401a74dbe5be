"""Divergence under eviction against a plain loop over the same tokens, and against values worked out by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.generation import fidelity
from evictbench.generation.fidelity import Comparison, Text, divergence, evaluate, summarise
from evictbench.policies.full import Full
from evictbench.policies.h2o import H2O
from evictbench.policies.random import Random
from evictbench.policies.snapkv import SnapKV
from evictbench.policies.streaming_llm import StreamingLLM
from evictbench.policies.tova import TOVA
from evictbench.policy import Policy
from evictbench.policy.budget import Budget
from twin import tiny_model

POLICIES: list[Policy] = [
    Random(Random.Config(recent=8)),
    StreamingLLM(),
    TOVA(),
    H2O(),
    SnapKV(SnapKV.Config(window=4, kernel=3, decode="reselect")),
]
SHAPES = [(40, 9), (3, 17), (61, 1), (25, 40), (33, 5), (1, 6)]


def made_up(shapes: list[tuple[int, int]] = SHAPES, border: bool = False) -> list[Text]:
    draw = random.Random(0)
    return [
        Text(
            key,
            tuple(draw.choices(range(97), k=prompt)),
            tuple(draw.choices(range(97), k=continuation)),
            border=prompt - 4 if border and prompt > 4 else None,
        )
        for key, (prompt, continuation) in enumerate(shapes)
    ]


def plain_loop(
    model: Any, policy: Policy, budget: Any, text: Text, prefill: Any, chunk: int
) -> list[tuple[float, ...]]:
    """The definition: dense logits of one forward pass without a cache; evicted ones token by token, batch of one."""
    whole = [*text.prompt, *text.continuation]
    with torch.no_grad():
        dense = model(input_ids=torch.tensor([whole]), use_cache=False).logits[0, len(text.prompt) - 1 : -1]
        border = text.border or len(text.prompt)
        cache = new_cache(model, policy, budget, prefill=prefill, prompt_length=border)
        at, rows = 0, []
        stops = [*range(chunk, border, chunk), border]
        stops += [len(text.prompt)] if border < len(text.prompt) else []
        for stop in [*stops, *range(len(text.prompt) + 1, len(whole))]:
            ids, positions = torch.tensor([whole[at:stop]]), torch.arange(at, stop)[None]
            logits = model(input_ids=ids, position_ids=positions, use_cache=True, past_key_values=cache).logits
            if stop >= len(text.prompt):
                rows.append(logits[0, -1])
            at = stop
    found = []
    for full, evicted, token in zip(dense, rows, text.continuation, strict=True):
        p, q = torch.softmax(full.double(), -1), torch.softmax(evicted.double(), -1)
        kl = sum(float(a) * (math.log(float(a)) - math.log(float(b))) for a, b in zip(p, q, strict=True))
        agrees = float(int(full.argmax()) == int(evicted.argmax()))
        found.append((kl, agrees, -math.log(float(p[token])), -math.log(float(q[token]))))
    return found


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize(("prefill", "border"), [("native", False), ("native", True), ("bounded", False)])
def test_equals_a_plain_loop(policy: Policy, prefill: Any, border: bool) -> None:
    model, budget, texts = tiny_model(), Budget.parse("20"), made_up(border=border)
    results = evaluate(model, policy, budget, texts, prefill=prefill, chunk=7, batch_size=3)
    differs = False
    for text, result in zip(texts, results, strict=True):
        expected = plain_loop(model, policy, budget, text, prefill, 7)
        assert len(result.divergence) == len(text.continuation)
        for ours, theirs in zip(result.divergence, expected, strict=True):
            assert tuple(ours) == pytest.approx(theirs, abs=1e-9)
        differs = differs or result.metrics["kl"] > 1e-3
        assert result.occupancy_max <= 20
        assert result.decode_steps == len(text.continuation) - 1
    assert differs


@pytest.mark.parametrize("policy", [*POLICIES, Full()], ids=lambda policy: policy.name)
def test_budget_beyond_the_text_changes_nothing(tiny_llama: Any, policy: Policy) -> None:
    """In float32: kernel noise, no more; no first token changes."""
    budget = Budget.parse("200") if policy.needs_budget else None
    for result in evaluate(tiny_llama(), policy, budget, made_up(), chunk=7, batch_size=2):
        assert result.metrics["kl"] <= 1e-6
        assert result.score == result.metrics["agreement"] == 1.0
        assert result.metrics["ppl_ratio"] == pytest.approx(1, abs=1e-4)


def test_dense_prefill_leaves_the_first_token_alone() -> None:
    """What is cut at the end of the prompt is not seen before the second token of the continuation."""
    result = evaluate(tiny_model(), TOVA(), Budget.parse("8"), made_up([(60, 6)]), chunk=7)[0]
    assert result.divergence[0].kl < 1e-12
    assert result.divergence[1].kl > 1e-4


def test_less_budget_diverges_more() -> None:
    texts = made_up([(80, 40)] * 8)
    means = []
    for budget in ("16", "48", "96", "120"):
        results = evaluate(tiny_model(), TOVA(), Budget.parse(budget), texts)
        means.append(sum(result.metrics["kl"] for result in results) / len(results))
    assert means == sorted(means, reverse=True)
    assert means[0] > 10 * means[2] > 0


def test_hand_worked_divergence() -> None:
    """p = (1/2, 1/4, 1/4) against q = (1/4, 1/2, 1/4): KL = 1/2 log 2 - 1/4 log 2; the text goes on with token 2."""
    full = torch.tensor([[2.0, 1.0, 1.0], [5.0, 5.0, 1.0]]).log()
    evicted = torch.tensor([[1.0, 2.0, 1.0], [10.0, 10.0, 2.0]]).log()
    first, same = divergence(full, evicted, [2, 0])
    assert tuple(first) == pytest.approx((math.log(2) / 4, 0.0, math.log(4), math.log(4)))
    assert tuple(same) == pytest.approx((0.0, 1.0, math.log(11 / 5), math.log(11 / 5)), abs=1e-6)
    metrics = summarise([first, same])
    assert metrics["kl"] == pytest.approx(math.log(2) / 8)
    assert metrics["agreement"] == 0.5
    assert metrics["ppl_ratio"] == pytest.approx(1.0)


def test_tokens_that_a_model_rules_out_are_not_a_number_of_their_own() -> None:
    """Logits of -inf (masked ends of a vocabulary) in both distributions add nothing."""
    full = torch.tensor([[0.0, 0.0, -math.inf]])
    found = divergence(full, torch.tensor([[0.0, math.log(3.0), -math.inf]]), [1])[0]
    assert found.kl == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75))


def test_summary_by_quarters_and_buckets() -> None:
    tokens = [fidelity.TokenDivergence(float(i), float(i % 2), 1.0, 3.0) for i in range(40)]
    metrics = summarise(tokens)
    assert [metrics[f"kl_q{quarter}"] for quarter in (1, 2, 3, 4)] == [4.5, 14.5, 24.5, 34.5]
    assert metrics["ppl_ratio"] == pytest.approx(math.exp(2))
    text = made_up([(4, 40)])
    result = evaluate(tiny_model(), TOVA(), Budget.parse("8"), text)[0]
    assert len(result.by_position["kl"]) == len(result.by_position["agreement"]) == 2
    whole = (32 * result.by_position["kl"][0] + 8 * result.by_position["kl"][1]) / 40
    assert whole == pytest.approx(result.metrics["kl"])


def test_what_the_model_does_behind_its_head_holds() -> None:
    """Granite divides its logits; a comparison that read the head's raw output would be 8 times as steep."""
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        logits_scaling=8.0,
        attention_multiplier=0.25,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = GraniteForCausalLM(config).eval()
    text = made_up([(30, 6)])[0]
    result = evaluate(model, TOVA(), Budget.parse("12"), [text])[0]
    expected = plain_loop(model, TOVA(), Budget.parse("12"), text, "native", 512)
    for ours, theirs in zip(result.divergence, expected, strict=True):
        assert tuple(ours) == pytest.approx(theirs, abs=1e-5)


def test_logits_stay_small() -> None:
    """The head never sees more than the dense and the evicted vector of each row, however long the text."""
    model = tiny_model()
    seen: list[tuple[int, ...]] = []
    handle = model.lm_head.register_forward_hook(lambda module, arguments, output: seen.append(tuple(output.shape)))
    try:
        evaluate(model, TOVA(), Budget.parse("16"), made_up([(50, 30)] * 3), chunk=16, batch_size=3)
    finally:
        handle.remove()
    assert max(rows * tokens for rows, tokens, _ in seen) == 6
    assert not model.lm_head._forward_pre_hooks


def test_out_of_memory_halves_the_rows_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = made_up([(30, 10)] * 5)
    expected = evaluate(tiny_model(), H2O(), Budget.parse("16"), texts, batch_size=1)
    real, failures = Comparison.step, []

    def failing(self: Comparison, active: Any, cache: Any) -> None:
        if len(active) > 2:
            failures.append(len(active))
            raise torch.OutOfMemoryError("no room")
        real(self, active, cache)

    monkeypatch.setattr(Comparison, "step", failing)
    results = evaluate(tiny_model(), H2O(), Budget.parse("16"), texts, batch_size=4)
    assert failures
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-9)


def test_empty_texts_are_refused() -> None:
    for text in (Text(0, (), (1,)), Text(0, (1,), ())):
        with pytest.raises(UserError, match="at least one token each"):
            evaluate(tiny_model(), Full(), None, [text])


def test_float64_over_a_whole_vocabulary() -> None:
    """Nearly equal distributions over 150,000 tokens: float32 sums would be off by more than the value."""
    full = torch.randn(1, 150_000, generator=torch.Generator().manual_seed(0))
    evicted = full + 1e-4 * torch.randn(1, 150_000, generator=torch.Generator().manual_seed(1))
    p: Tensor = full.double().softmax(-1)
    expected = float((p * (full.double().log_softmax(-1) - evicted.double().log_softmax(-1))).sum())
    assert divergence(full, evicted, [0])[0].kl == pytest.approx(expected, rel=1e-6)
    assert 0 < expected < 1e-7
