"""The twins against transformers, and what holds for every rule."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from twin import (
    H2O,
    TOVA,
    Budget,
    Cut,
    Full,
    Random,
    Rule,
    SnapKV,
    StreamingLLM,
    Trace,
    choose,
    dense_forward,
    random_tokens,
    simulate,
    tiny_model,
)
from twin.cases import RULES, Case, cases, sample_priority
from twin.kvpop import KVpop

quick = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def rule_named(name: str) -> Rule:
    return {
        "full": Full(),
        "random": Random(sample_priority, sinks=2, recent=4),
        "streaming_llm": StreamingLLM(),
        "tova": TOVA(),
        "h2o": H2O(),
        "snapkv": SnapKV(window=4, kernel=3, decode="reselect"),
        "kvpop": KVpop(memory=True, sinks=2, window=4),
        "kvpop_mlp": KVpop(memory=False, sinks=2, window=4),
    }[name]


def per_head(trace: Trace, seen: int) -> list[list[int]]:
    return list(trace.kept[seen].values())


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


# The model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("kv_heads", "groups", "layers", "tied"), [(2, 2, 2, True), (2, 3, 3, False), (1, 4, 2, False)]
)
def test_full_equals_transformers(kind, kv_heads, groups, layers, tied):
    model = tiny_model(kind, 1, layers, kv_heads, groups, tied=tied)
    tokens = random_tokens(23)
    model.set_attn_implementation("sdpa")
    want = model(torch.tensor([tokens])).logits[0]
    assert want.dtype == torch.float64
    near(dense_forward(model, tokens).logits, want)
    trace = simulate(model, Full(), tokens[:17], tokens[17:], None, chunk=5)
    near(trace.logits, want)
    assert trace.generated == tokens[17:]


def test_full_generates_what_transformers_generates():
    model = tiny_model("qwen3", 2)
    model.set_attn_implementation("sdpa")
    prompt = random_tokens(9)
    want = model.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)[0].tolist()
    assert simulate(model, Full(), prompt, 8, None).tokens == want


def test_a_float32_model_as_transformers_makes_it():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = LlamaForCausalLM(config).eval()
    tokens = random_tokens(12)
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0].double()
    near(dense_forward(model, tokens).logits, want, 1e-4)
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_probabilities_equal_the_eager_ones(kind):
    model = tiny_model(kind, 3, 2, 2, 3)
    tokens = random_tokens(15)
    model.set_attn_implementation("eager")
    try:
        want = model(torch.tensor([tokens]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    got = dense_forward(model, tokens)
    for layer in range(2):
        near(got.probs[layer], want[layer][0], 1e-6)  # the eager softmax is float32
        assert got.queries[layer].shape == (15, 6, 16)
        assert got.keys[layer].shape == got.values[layer].shape == (15, 2, 16)


def test_attention_is_far_from_uniform():
    probs = dense_forward(tiny_model("llama", 0), random_tokens(30)).probs[1]
    assert probs[:, -1].max() > 5 / 30


# All rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("prefill", ["native", "dense", "bounded"])
@pytest.mark.parametrize("border", [None, 9])
def test_a_budget_of_the_length_is_the_full_cache(name, prefill, border):
    model = tiny_model("llama", 4)
    prompt, new = random_tokens(14), 6
    full = simulate(model, Full(), prompt, new, None)
    for budget in (len(prompt) + new, 1000, 1.0):  # 20 entries hold all that the last query sees
        trace = simulate(model, rule_named(name), prompt, new, budget, prefill, 3, border)
        assert trace.generated == full.generated
        assert trace.seen == full.seen
        near(trace.logits, full.logits)


@pytest.mark.parametrize("name", RULES[1:])
def test_one_less_than_the_length_loses_something(name):
    trace = simulate(tiny_model("llama", 4), rule_named(name), random_tokens(14), 6, 19)
    assert max(trace.occupancy(18).values()) == 19
    assert max(trace.occupancy(19).values()) <= 19


@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
@quick
def test_what_any_run_must_obey(name, data):
    case: Case = data.draw(cases(name))
    trace = case.trace()
    rule = case.rule
    context = case.border or len(case.prompt)
    budget = Budget(case.budget, context)
    assert len(trace.logits) == len(trace.seen) == len(trace.tokens)
    assert torch.isfinite(trace.logits).all()

    held_until: dict[tuple[int, int], set[int]] = {}
    for query, heads in enumerate(trace.seen):
        for head, positions in heads.items():
            assert positions == sorted(set(positions))
            assert positions[-1] == query
            lost = set(range(query)) - set(positions)
            assert held_until.get(head, set()) <= lost, "a dropped position came back"
            held_until[head] = lost
            allowed = budget.at(query + 1)
            append = isinstance(rule, SnapKV) and rule.decode == "append"
            exact = rule.token_at_a_time and (case.prefill != "dense" or query >= context)
            if allowed is not None and not append and (query >= len(case.prompt) or exact):
                assert len(positions) <= allowed
                if isinstance(rule, (TOVA, H2O, Random, StreamingLLM)) and exact:
                    assert len(positions) == min(query + 1, allowed)

    ends = {*range(case.chunk, context, case.chunk), context, *range(len(case.prompt), len(trace.tokens) + 1)}
    if rule.token_at_a_time and case.prefill != "dense":
        ends = set(range(1, len(trace.tokens) + 1))
    elif rule.token_at_a_time:
        ends |= set(range(context, len(case.prompt)))
    assert set(trace.kept) == ends
    for seen, heads in trace.kept.items():
        if seen < len(trace.tokens):
            for head, kept in heads.items():
                assert trace.seen[seen][head] == [*kept, seen]
    if isinstance(rule, (TOVA, StreamingLLM)):
        for heads in trace.kept.values():
            for layer in range(case.layers):
                assert len({tuple(kept) for (where, _), kept in heads.items() if where == layer}) == 1


@pytest.mark.parametrize("name", ["random", "streaming_llm", "tova", "h2o", "snapkv"])
@given(data=st.data())
@quick
def test_a_masked_dense_forward_says_the_same(name, data):
    """The layer-by-layer, chunk-by-chunk machinery against one pass under the recorded visibility."""
    case: Case = data.draw(cases(name))
    if isinstance(case.rule, StreamingLLM):
        case = dataclasses.replace(case, rule=dataclasses.replace(case.rule, positions="original"))
    trace = case.trace()
    once = dense_forward(case.model(), trace.tokens, lambda layer, kv_head, query: trace.seen[query][layer, kv_head])
    near(once.logits, trace.logits)
    for layer in range(case.layers):
        near(once.probs[layer], trace.record.probs[layer])
    if isinstance(case.new_tokens, int):
        for step, token in enumerate(trace.generated):
            assert once.logits[len(case.prompt) + step - 1].argmax() == token


@pytest.mark.parametrize("name", ["streaming_llm", "tova"])
def test_transformers_itself_under_the_recorded_mask(name):
    """One layer's set for all: transformers takes it as a 4-D mask."""
    rule = StreamingLLM(sinks=2, positions="original") if name == "streaming_llm" else TOVA()
    model = tiny_model("qwen3", 5, layers=2 if name == "streaming_llm" else 1)
    trace = simulate(model, rule, random_tokens(20), 8, 9, "bounded", 4)
    model.set_attn_implementation("sdpa")
    mask = torch.full((1, 1, 28, 28), -math.inf, dtype=torch.float64)
    for query, heads in enumerate(trace.seen):
        mask[0, 0, query, heads[0, 0]] = 0
    near(model(torch.tensor([trace.tokens]), attention_mask=mask).logits[0], trace.logits)


@pytest.mark.parametrize("name", RULES[1:])
def test_a_one_token_prompt(name):
    rule = Random(sample_priority, sinks=0, recent=1) if name == "random" else rule_named(name)
    rule = StreamingLLM(sinks=0) if name == "streaming_llm" else rule
    rule = KVpop(memory=name == "kvpop", sinks=0, window=1) if name.startswith("kvpop") else rule
    for budget in (rule.least_budget, 3):
        trace = simulate(tiny_model("llama", 1), rule, [5], 6, budget)
        assert trace.occupancy(0) == dict.fromkeys(trace.occupancy(0), 1)
        assert max(trace.occupancy(6).values()) <= budget


def test_the_same_prompt_in_any_mode_when_nothing_generates():
    trace = simulate(tiny_model("llama", 1), TOVA(), random_tokens(7), 0, 3)
    assert trace.generated == []
    assert set(trace.kept) == {7}


def test_impossible_requests():
    model = tiny_model()
    with pytest.raises(ValueError, match="at least 5"):
        simulate(model, StreamingLLM(), random_tokens(9), 1, 4)
    with pytest.raises(ValueError, match="at least 37"):
        simulate(model, Random(sample_priority), random_tokens(9), 1, 36)
    with pytest.raises(ValueError, match="at least 37"):
        simulate(model, Random(sample_priority), random_tokens(9), 1, 0.5)
    with pytest.raises(ValueError, match="at least 1"):
        simulate(model, TOVA(), random_tokens(9), 1, 0)
    with pytest.raises(ValueError, match="border"):
        simulate(model, TOVA(), random_tokens(9), 1, 4, border=10)
    with pytest.raises(ValueError, match="empty"):
        simulate(model, TOVA(), [], 1, 4)


def test_choose_breaks_ties_by_position():
    assert choose({3: 1.0, 1: 1.0, 2: 1.0}, 2) == Cut([1, 2], 0.0)
    assert choose({3: 2.0, 1: 1.0, 2: 1.0}, 2) == Cut([1, 3], 0.0)
    assert choose({3: 2.0, 1: 1.0, 2: 1.5}, 2) == Cut([2, 3], 0.5)
    assert choose({3: 2.0}, 5) == Cut([3])
    assert choose({3: 2.0}, 0) == Cut([])


# Budgets ------------------------------------------------------------------------------------------


def test_shares_grow_with_what_is_seen():
    budget = Budget(0.5, 100)
    assert [budget.at(n) for n in (1, 100, 101, 102, 200)] == [50, 50, 50, 51, 100]
    assert [Budget(0.25, 40).at(n) for n in (1, 128, 132)] == [32, 32, 33]
    assert Budget(7, 100).at(500) == 7
    assert Budget(None, 3).at(500) is None


@pytest.mark.parametrize("name", ["streaming_llm", "tova", "h2o"])
def test_a_share_is_of_the_context_when_the_question_is_unseen(name):
    # 0.5 of a context of 70: 35 until 72 tokens are seen, then one more for every two.
    trace = simulate(
        tiny_model("llama", 2),
        rule_named(name),
        random_tokens(74),
        random_tokens(8, 1),
        0.5,
        "native",
        16,
        70,
    )
    for query in range(74, 82):
        assert set(trace.occupancy(query).values()) == {(query + 1) // 2}
    assert {len(kept) for kept in per_head(trace, 70)} == {34}


def test_charged_state_comes_out_of_the_budget():
    assert Budget(0.5, 100, charged=10).at(1) == 40
    model = tiny_model("llama", 2)
    charged = simulate(model, SnapKV(4, 3, decode="reselect"), random_tokens(30), 4, 20, charged=4)
    assert charged.kept == simulate(model, SnapKV(4, 3, decode="reselect"), random_tokens(30), 4, 16).kept
