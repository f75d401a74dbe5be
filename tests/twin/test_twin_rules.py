"""Each rule against its closed form and against cases made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from twin import (
    H2O,
    TOVA,
    Budget,
    Full,
    Random,
    SnapKV,
    StreamingLLM,
    Trace,
    dense_forward,
    random_tokens,
    simulate,
    tiny_model,
)
from twin.cases import sample_priority


def per_head(trace: Trace, seen: int) -> list[list[int]]:
    return list(trace.kept[seen].values())


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


# full, random, streaming_llm ----------------------------------------------------------------------


@pytest.mark.parametrize("rule", [StreamingLLM(sinks=2), Random(sample_priority, sinks=1, recent=3)])
@pytest.mark.parametrize("border", [None, 21])
def test_any_chunk_gives_the_token_at_a_time_result(rule, border):
    model = tiny_model("qwen3", 6)
    one = simulate(model, rule, random_tokens(30), 6, 9, "native", 1)
    for prefill, chunk in (("native", 7), ("bounded", 16), ("native", 100), ("bounded", 1)):
        other = simulate(model, rule, random_tokens(30), 6, 9, prefill, chunk, border)
        assert other.seen == one.seen
        assert other.kept == one.kept
        near(other.logits, one.logits)


@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("positions", ["reindexed", "original"])
def test_streaming_llm_holds_the_sinks_and_the_last(sinks, positions):
    budget = 9
    trace = simulate(tiny_model("llama", 1), StreamingLLM(sinks, positions), random_tokens(30), 10, budget)
    for query, heads in enumerate(trace.seen):
        want = sorted(
            {p for p in range(query + 1) if p < sinks} | set(range(max(0, query + 1 - budget + sinks), query + 1))
        )
        assert all(positions == want for positions in heads.values())


def test_streaming_llm_dense_cuts_once_after_the_prompt():
    model = tiny_model("llama", 1)
    trace = simulate(model, StreamingLLM(2), random_tokens(20), 5, 6, "dense", 8)
    full = simulate(model, Full(), random_tokens(20), 0, None)
    near(trace.logits[:20], full.logits)  # nothing moves while nothing is hidden
    assert per_head(trace, 16) == [list(range(16))] * 4
    assert per_head(trace, 20) == [[0, 1, 17, 18, 19]] * 4
    assert trace.seen[21][0, 0] == [0, 1, 18, 19, 20, 21]


@pytest.mark.parametrize(
    ("prefill", "border", "budget"), [("native", None, 9), ("dense", 20, 9), ("native", None, 0.5)]
)
def test_reindexing_moves_the_sinks_alone(prefill, border, budget):
    """Slots 0, 1, ... for the keys and the last for the query: sink j ends at distance min(q, B - 1) - j."""
    sinks = 3
    length = 30 if budget == 9 else 70
    trace = simulate(tiny_model("qwen3", 3), StreamingLLM(sinks), random_tokens(length), 9, budget, prefill, 8, border)
    record = trace.record
    dense = record.dense
    budgets = Budget(budget, border or length)
    moved = 0
    for query, heads in enumerate(trace.seen):
        whole = len(heads[0, 0]) == query + 1  # still inside the dense part, or within the budget
        sink_query = query if whole else min(query, budgets.at(query + 1) - 1)
        moved += sink_query != query
        for (layer, kv_head), visible in heads.items():
            for head in record.heads_of(kv_head):
                raw = record.raw_queries[layer][query, head][None, None]
                near_query = dense.rotate(raw, [query])[0, 0]
                far_query = dense.rotate(raw, [sink_query])[0, 0]
                logits = [
                    (far_query if p < sinks else near_query) @ record.keys[layer][p, kv_head] * dense.head_dim**-0.5
                    for p in visible
                ]
                near(torch.stack(logits).softmax(0), record.probs[layer][head, query, visible], 1e-10)
    assert moved > 10


def test_reindexing_changes_the_answer_and_original_does_not_reindex():
    model = tiny_model("llama", 1)
    reindexed = simulate(model, StreamingLLM(2), random_tokens(20), [], 6)
    original = simulate(model, StreamingLLM(2, "original"), random_tokens(20), [], 6)
    assert (reindexed.logits - original.logits).abs().max() > 1e-3
    near(reindexed.logits[:6], original.logits[:6])


def deadline(rule: Random, layer: int, kv_head: int, position: int, budget: int, length: int) -> float:
    """The first query that no longer sees a position: when k better ones have left the window beside it."""
    if position < rule.sinks:
        return math.inf
    pool = budget - rule.sinks - rule.recent

    def rank(p: int) -> tuple[float, int]:
        return (-rule.priority(rule.seed, layer, kv_head, p), p)

    for query in range(position + rule.recent, length):
        outside = range(rule.sinks, query - rule.recent + 1)
        if sum(rank(p) < rank(position) for p in outside) >= pool:
            return query
    return math.inf


def coarse(seed: int, layer: int, kv_head: int, position: int) -> float:
    return math.floor(sample_priority(seed, layer, kv_head, position) * 3) / 3


@pytest.mark.parametrize("priority", [sample_priority, coarse])
@pytest.mark.parametrize(("sinks", "recent", "budget"), [(4, 32, 37), (4, 3, 12), (0, 1, 2), (1, 5, 20)])
def test_random_by_deadlines(priority, sinks, recent, budget):
    rule = Random(priority, seed=3, sinks=sinks, recent=recent)
    length = 60
    trace = simulate(tiny_model("llama", 2), rule, random_tokens(length - 10), 10, budget)
    for layer, kv_head in trace.seen[0]:
        dies = [deadline(rule, layer, kv_head, p, budget, length) for p in range(length)]
        for query in range(length):
            assert trace.seen[query][layer, kv_head] == [p for p in range(query + 1) if query < dies[p]]
    different = {tuple(positions) for positions in trace.seen[-1].values()}
    assert len(different) > 1, "layers and heads draw alike"


def test_random_dense_ends_with_the_same_set_at_a_fixed_budget():
    model = tiny_model("llama", 2)
    rule = Random(sample_priority, sinks=1, recent=4)
    native = simulate(model, rule, random_tokens(30), random_tokens(5), 11)
    dense = simulate(model, rule, random_tokens(30), random_tokens(5), 11, "dense")
    assert native.kept[30] == dense.kept[30]
    assert native.seen[30:] == dense.seen[30:]
    assert native.seen[20] != dense.seen[20]


# tova ---------------------------------------------------------------------------------------------


def test_tova_keeps_what_the_last_query_looks_at():
    model = tiny_model("llama", 7, 2, 2, 3)
    tokens = random_tokens(18)
    probs = dense_forward(model, tokens).probs
    trace = simulate(model, TOVA(), tokens, 0, 8)
    for layer in range(2):
        order = probs[layer][:, -1].mean(0).argsort(descending=True)[:7]
        assert trace.kept[18][layer, 0] == trace.kept[18][layer, 1] == sorted(order.tolist())
    assert trace.kept[18][0, 0] != trace.kept[18][1, 0]


def test_tova_with_budget_one_sees_itself_alone():
    trace = simulate(tiny_model("llama", 1), TOVA(), random_tokens(6), 4, 1)
    assert per_head(trace, 6) == [[]] * 4
    assert all(set(heads.values()) == {1} for heads in map(trace.occupancy, range(6, 10)))
    bounded = simulate(tiny_model("llama", 1), TOVA(), random_tokens(6), 4, 1, "bounded", 4)
    assert bounded.seen[4][0, 0] == [4]
    assert bounded.seen[5][0, 0] == [4, 5]


def test_tova_ties_keep_the_earlier():
    flat = tiny_model("llama", 1, flat=True)
    trace = simulate(flat, TOVA(), random_tokens(10), 3, 4)
    assert per_head(trace, 10) == [[0, 1, 2]] * 4  # the newest goes too
    assert trace.seen[12][1, 1] == [0, 1, 2, 12]
    assert trace.gaps
    assert set(trace.gaps) == {0.0}
    assert trace.closest == math.inf


def test_tova_bounded_acts_after_every_chunk_and_the_border_ends_one():
    trace = simulate(tiny_model("llama", 1), TOVA(), random_tokens(20), 2, 5, "bounded", 4, 10)
    assert set(trace.kept) == {4, 8, 10, 20, 21, 22}
    assert {seen: len(kept[0, 0]) for seen, kept in trace.kept.items()} == {
        4: 4,
        8: 4,
        10: 4,
        20: 4,
        21: 4,
        22: 4,
    }
    assert [len(trace.seen[q][0, 0]) for q in (4, 7, 8, 9, 10, 19, 20)] == [5, 8, 5, 6, 5, 14, 5]
    native = simulate(tiny_model("llama", 1), TOVA(), random_tokens(20), 2, 5, "native", 4, 10)
    assert [len(native.seen[q][0, 0]) for q in (7, 9, 10, 19, 20)] == [8, 10, 5, 14, 5]
    assert [len(native.kept[seen][0, 0]) for seen in (4, 8, 10, 20)] == [4, 8, 4, 4]


# h2o ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["mean", "max", "sum"])
@pytest.mark.parametrize("budget", [1, 2, 3, 8, 9])
def test_h2o_keeps_heavy_and_recent_halves(group, budget):
    model = tiny_model("qwen3", 7, 2, 2, 2)
    tokens = random_tokens(18)
    probs = dense_forward(model, tokens).probs
    trace = simulate(model, H2O(group), tokens, 0, budget)
    recent = [18 - back for back in range(1, budget // 2)]  # the next query is the first of the recent half
    for layer in range(2):
        for kv_head in range(2):
            mass = probs[layer][2 * kv_head : 2 * kv_head + 2].sum(1)
            mass = {"mean": mass.mean(0), "sum": mass.sum(0), "max": mass.amax(0)}[group]
            mass[recent] = -1
            heavy = mass.argsort(descending=True)[: budget - 1 - len(recent)].tolist()
            assert trace.kept[18][layer, kv_head] == sorted(recent + heavy)


def test_h2o_groups_differ():
    kept = [
        simulate(tiny_model("llama", 7), H2O(group), random_tokens(30), 0, 12).kept[30]
        for group in ("mean", "max", "sum")
    ]
    assert kept[0] == kept[2] != kept[1]


def test_h2o_adds_up_over_forwards():
    """Decode by hand from the recorded probabilities: masses carried along, one out per step."""
    budget = 8
    trace = simulate(
        tiny_model("llama", 8, groups=1),
        H2O(),
        random_tokens(20),
        random_tokens(6, 1),
        budget,
        "bounded",
        6,
        13,
    )
    ends = sorted(trace.kept)
    for head in [(0, 0), (1, 1)]:
        probs = trace.record.probs[head[0]][head[1]]
        mass: dict[int, float] = {}
        start = 0
        for end in ends:
            for query in range(start, end):
                for p in trace.seen[query][head]:
                    mass[p] = mass.get(p, 0.0) + probs[query, p].item()
            while len(mass) + 1 > budget:
                candidates = [p for p in mass if p <= end - budget // 2]
                del mass[min(candidates, key=lambda p: mass[p])]
            assert sorted(mass) == trace.kept[end][head]
            start = end


# snapkv -------------------------------------------------------------------------------------------

HELD_WINDOW: dict[str, Any] = {"decode": "reselect", "votes": "window"}


@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("group", ["mean", "max", "sum"])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_snapkv_at_the_end_of_the_prompt(pool, group, kernel):
    model = tiny_model("llama", 9, 2, 2, 3)
    tokens, window, budget = random_tokens(40), 5, 17
    probs = dense_forward(model, tokens).probs
    trace = simulate(model, SnapKV(window, kernel, pool, group, "reselect", "window"), tokens, 0, budget)
    appended = simulate(model, SnapKV(window, kernel, pool, group, "append"), tokens, 0, budget)
    for layer in range(2):
        for kv_head in range(2):
            votes = probs[layer][3 * kv_head : 3 * kv_head + 3, -window:, :-window].sum(1)
            votes = {"mean": votes.mean(0), "sum": votes.sum(0), "max": votes.amax(0)}[group][None, None]
            smooth = (
                F.max_pool1d(votes, kernel, 1, kernel // 2)
                if pool == "max"
                else F.avg_pool1d(votes, kernel, 1, kernel // 2)
            )[0, 0]
            order = smooth.argsort(descending=True, stable=True).tolist()
            last = list(range(35, 40))
            assert trace.kept[40][layer, kv_head] == sorted(order[: 15 - window]) + last  # 17 - max(1, 17 // 8)
            assert appended.kept[40][layer, kv_head] == sorted(order[: 17 - window]) + last


def test_snapkv_reselects_when_full():
    budget = 24  # i = 3
    trace = simulate(tiny_model("llama", 9), SnapKV(4, 3, **HELD_WINDOW), random_tokens(40), 12, budget)
    sizes = [len(per_head(trace, seen)[0]) for seen in range(40, 53)]
    assert sizes == [21, 22, 23, 21, 22, 23, 21, 22, 23, 21, 22, 23, 21]
    assert [trace.occupancy(q)[0, 0] for q in range(40, 47)] == [22, 23, 24, 22, 23, 24, 22]
    for seen in range(40, 53):
        for kept in per_head(trace, seen):
            assert kept[-4:] == list(range(seen - 4, seen))


@pytest.mark.parametrize(("budget", "kept"), [(7, 6), (8, 7), (15, 14), (16, 14), (23, 21), (1036, 908)])
def test_snapkv_leaves_an_eighth_free_and_at_most_128(budget, kept):
    trace = simulate(
        tiny_model("llama", 9, 1, 1, 1),
        SnapKV(2, 3, **HELD_WINDOW),
        random_tokens(budget),
        0,
        budget,
        chunk=budget,
    )
    assert len(trace.kept[budget][0, 0]) == kept


def test_snapkv_reselection_by_hand():
    """At 43 seen: the last four queries over the 24 keys then held, the denominators of those alone."""
    model = tiny_model("llama", 9)
    rule = SnapKV(4, 3, **HELD_WINDOW)
    trace = simulate(model, rule, random_tokens(40), 3, 24)
    record = trace.record
    for (layer, kv_head), kept in trace.kept[43].items():
        held = trace.seen[42][layer, kv_head]
        assert len(held) == 24
        keys = record.keys[layer][held, kv_head]
        logits = torch.einsum("qhd,kd->hqk", record.queries[layer][39:43, record.heads_of(kv_head)], keys) / 4
        future = torch.tensor(held)[None, :] > torch.arange(39, 43)[:, None]
        votes = logits.masked_fill(future, -math.inf).softmax(-1).sum(1).mean(0)[:20]
        order = F.max_pool1d(votes[None, None], 3, 1, 1)[0, 0].argsort(descending=True, stable=True)[:17]
        assert kept == sorted(held[i] for i in order.tolist()) + held[20:]


def test_snapkv_append_never_cuts_again():
    trace = simulate(tiny_model("llama", 9), SnapKV(4, 3, decode="append"), random_tokens(40), 10, 12, "native", 16, 30)
    assert [len(kept) for kept in per_head(trace, 30)] == [12] * 4
    assert [len(kept) for kept in per_head(trace, 40)] == [22] * 4
    assert [len(kept) for kept in per_head(trace, 50)] == [32] * 4
    exact = simulate(tiny_model("llama", 9), SnapKV(4, 3, decode="append"), random_tokens(12), 3, 12)
    assert per_head(exact, 12) == [list(range(12))] * 4
    assert per_head(exact, 15) == [list(range(15))] * 4


def test_snapkv_with_a_window_over_the_budget_keeps_the_last():
    trace = simulate(tiny_model("llama", 9), SnapKV(**HELD_WINDOW), random_tokens(40), 4, 10)
    assert per_head(trace, 40) == [list(range(31, 40))] * 4
    trace = simulate(tiny_model("llama", 9), SnapKV(**HELD_WINDOW), random_tokens(5), 4, 1)
    assert per_head(trace, 5) == [[]] * 4


def test_snapkv_with_a_prompt_shorter_than_the_window():
    trace = simulate(tiny_model("llama", 9), SnapKV(8, 3, **HELD_WINDOW), random_tokens(3), 20, 12)
    assert trace.occupancy(11)[0, 0] == 12
    assert [len(kept) for kept in per_head(trace, 12)] == [11] * 4
    assert {tuple(kept[-8:]) for kept in per_head(trace, 12)} == {tuple(range(4, 12))}
    assert max(trace.occupancy(22).values()) == 12


def test_snapkv_window_reaches_over_the_border():
    """A question of two tokens: the window still holds eight queries, six of them from the context."""
    trace = simulate(tiny_model("llama", 9), SnapKV(8, 1, **HELD_WINDOW), random_tokens(32), 0, 20, border=30)
    record = trace.record
    for (layer, kv_head), kept in trace.kept[32].items():
        held = [*trace.kept[30][layer, kv_head], 30, 31]
        if len(held) + 1 <= 20:
            assert kept == held
    tight = simulate(tiny_model("llama", 9), SnapKV(8, 1, **HELD_WINDOW), random_tokens(36), 0, 20, border=30)
    record = tight.record
    for (layer, kv_head), kept in tight.kept[36].items():
        held = [*tight.kept[30][layer, kv_head], *range(30, 36)]
        votes = dict.fromkeys(held, 0.0)
        for query in range(28, 36):
            visible = [p for p in held if p <= query]
            for head in record.heads_of(kv_head):
                probs = record.probs_over(layer, head, query, visible).tolist()
                for p, prob in zip(visible, probs, strict=True):
                    votes[p] += prob / 2
        best = sorted((p for p in held if p < 28), key=lambda p: (-votes[p], p))[: 18 - 8]
        assert kept == sorted(best) + list(range(28, 36))


@pytest.mark.parametrize("budget", [9, 24])
def test_snapkv_with_running_votes_is_full_at_every_step(budget):
    trace = simulate(tiny_model("llama", 9), SnapKV(4, 3, decode="reselect"), random_tokens(40), 12, budget)
    assert [len(per_head(trace, seen)[0]) for seen in range(40, 53)] == [budget - 1] * 13
    assert {trace.occupancy(q)[0, 0] for q in range(40, 52)} == {budget}
    for seen in range(40, 53):
        for kept in per_head(trace, seen):
            assert kept[-4:] == list(range(seen - 4, seen))


def test_snapkv_s_running_votes_by_hand():
    """The prompt is cut as published; then each query's row is added to three quarters of what there was."""
    tokens, budget = random_tokens(40), 24
    model, rule = tiny_model("llama", 9), SnapKV(4, 3, decode="reselect")
    trace = simulate(model, rule, tokens, 6, budget)
    published = simulate(model, SnapKV(4, 3), tokens, 0, budget - 1)
    assert trace.kept[40] == published.kept[40]
    probs = dense_forward(model, tokens).probs
    for (layer, kv_head), first in trace.kept[40].items():
        heads = trace.record.heads_of(kv_head)
        given = probs[layer][heads, -4:].sum(1).mean(0)
        votes = {p: given[p].item() for p in first}
        for seen in range(41, 47):
            votes = {p: 0.75 * vote for p, vote in votes.items()} | {seen - 1: 0.0}
            for p in votes:
                votes[p] += trace.record.probs[layer][heads, seen - 1, p].mean().item()
            if len(votes) >= budget:
                del votes[min((p for p in votes if p < seen - 4), key=lambda p: (votes[p], -p))]
            assert sorted(votes) == trace.kept[seen][layer, kv_head]


def smoothed(values: Sequence[float], **setting: object) -> list[float]:
    return SnapKV(**setting).smooth(list(values))  # type: ignore[arg-type]


def test_snapkv_pools_as_torch_does():
    assert smoothed([1.0, 5.0, 2.0, 0.0], kernel=3) == [5.0, 5.0, 5.0, 2.0]
    assert smoothed([3.0, 6.0, 0.0], kernel=3, pool="avg") == [3.0, 3.0, 2.0]
    assert smoothed([3.0], kernel=7) == [3.0]
    assert smoothed([], kernel=7) == []
