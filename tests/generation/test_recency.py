"""The share of kept entries inside a recency window: closed forms, and positions looked at one by one, in every family
of caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from evictbench.generation.fidelity import Comparison, Text
from evictbench.generation.recency import RecencyWindow
from evictbench.models.policy_weights import Weights
from evictbench.policies.dms import DMS
from evictbench.policies.full import Full
from evictbench.policies.h2o import H2O
from evictbench.policies.indexmem_pp import IndexMem
from evictbench.policies.streaming_llm import StreamingLLM
from evictbench.policy import ModelShape, NewEntries
from evictbench.policy.budget import Budget
from twin.tiny import random_tokens, tiny_model

EVERY = 4


class ByPlace(IndexMem):  # type: ignore[misc, unused-ignore]
    """IndexMem++ without hooks, whose scores go up and down with the position."""

    hooks: frozenset[Any] = frozenset()  # type: ignore[assignment, unused-ignore]

    def features(self, entries: NewEntries) -> Mapping[str, Tensor]:
        scores = (entries.positions.double() * 0.7).sin()[:, None].expand(-1, entries.keys.shape[1], -1)
        return {"score": torch.stack((scores, torch.zeros_like(scores)), dim=-1).float()}


def dms() -> DMS:
    model: Any = tiny_model("qwen3")
    weight = torch.randn((2, 2, model.config.hidden_size), generator=torch.Generator().manual_seed(4)) * 0.05
    calibration = {"thresholds": [20.0, 0.0, -20.0], "beyond": [0.9, 0.5, 0.1]}
    card = {"window": 6, "sinks": 2, "epsilon": 1e-5, "calibration": calibration}
    policy = DMS()
    policy.use(
        Weights({"weight": weight, "bias": torch.full((2, 2), 0.05)}, card, "a test", "0"), ModelShape.of(model.config)
    )
    return policy


def texts(lengths: list[tuple[int, int]]) -> list[Text]:
    made = []
    for key, (prompt, following) in enumerate(lengths):
        tokens = tuple(random_tokens(prompt + following, seed=key))
        made.append(Text(key, tokens[:prompt], tokens[prompt:]))
    return made


def compared(policy: Any, budget: str | None, given: list[Text], window: RecencyWindow | None, rows: int = 1) -> Any:
    parsed = None if budget is None else Budget.parse(budget)
    comparison = Comparison(tiny_model("qwen3"), policy, parsed, batch_size=rows, chunk=17, recency=window)
    return comparison, {result.key: result for result in comparison.run(given)}


def test_a_policy_of_sinks_and_recent_entries_in_closed_form() -> None:
    given = texts([(40, 10)])
    policy = StreamingLLM(StreamingLLM.Config(sinks=4))
    for window, share in ((RecencyWindow(every=EVERY), 19 / 23), (RecencyWindow(6, every=EVERY), 6 / 23)):
        count = compared(policy, "24", given, window)[1][0].recency
        assert (count.steps, count.moments) == (9, 3)
        torch.testing.assert_close(count.shares(), torch.full((2, 1), share, dtype=torch.float64))


def test_the_full_cache_keeps_what_its_window_keeps() -> None:
    given = texts([(20, 6)])
    assert compared(Full(), None, given, RecencyWindow())[1][0].recency.shares().tolist() == [[1.0], [1.0]]
    seen = [21, 25]
    count = compared(Full(), None, given, RecencyWindow(5, every=EVERY))[1][0].recency
    assert count.shares().tolist() == [pytest.approx([sum(5 / n for n in seen) / 2])] * 2


POLICIES = {
    "slots": (lambda: H2O(), "24"),
    "expiry": (dms, "50%"),
    "head budgets": (lambda: ByPlace(IndexMem.Config(window=6, sinks=2, centroids=2, floor=4)), "24"),
}


@pytest.mark.parametrize("family", POLICIES)
def test_it_is_what_the_kept_positions_say(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that start, end and move in one batch, each looked at on its own, position by position."""
    make, budget = POLICIES[family]
    given = texts([(40, 14), (64, 5), (52, 9), (50, 1)])
    by_hand: dict[int, list[list[list[float]]]] = {}
    looked: list[tuple[int, int]] = []
    original = RecencyWindow._look

    def look(self: RecencyWindow, cache: Any, index: int, seen: int, count: Any) -> None:
        original(self, cache, index, seen, count)
        shares = []
        for layer in range(2):
            heads = [[place for place in head if place >= 0] for head in cache.kept(layer, index).tolist()]
            shares.append([sum(place >= seen - len(head) for place in head) / len(head) for head in heads])
        by_hand.setdefault(id(count), []).append(shares)
        looked.append((seen, index))

    monkeypatch.setattr(RecencyWindow, "_look", look)
    _, found = compared(make(), budget, given, RecencyWindow(every=EVERY), rows=3)
    for text in given[:3]:
        count = found[text.key].recency
        moments = -(-(len(text.continuation) - 1) // EVERY)
        assert (count.steps, count.moments) == (len(text.continuation) - 1, moments)
        expected = torch.tensor(by_hand[id(count)], dtype=torch.float64).mean(0)
        torch.testing.assert_close(count.shares(), expected)
        assert 0.2 < float(count.shares().mean()) < 1
    assert found[3].recency is None
    starts = [len(given[key].prompt) + 1 for key in range(3)]
    assert {seen for seen, _ in looked} == {
        start + step for key, start in enumerate(starts) for step in range(0, len(given[key].continuation) - 1, EVERY)
    }


def test_alone_or_together_it_is_the_same_and_changes_nothing() -> None:
    given = texts([(40, 14), (64, 5), (52, 9)])
    _, alone = compared(H2O(), "24", given, RecencyWindow(every=EVERY))
    _, together = compared(H2O(), "24", given, RecencyWindow(every=EVERY), rows=3)
    _, without = compared(H2O(), "24", given, None, rows=3)
    for key in range(3):
        torch.testing.assert_close(together[key].recency.shares(), alone[key].recency.shares())
        assert together[key].metrics == without[key].metrics
        assert without[key].recency is None


def test_without_a_window_no_position_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from evictbench.cache.slots.cache import SlotCache

    def kept(*_: Any) -> Tensor:
        raise AssertionError("somebody looked")

    monkeypatch.setattr(SlotCache, "kept", kept)
    compared(H2O(), "24", texts([(40, 14)]), None)
    with pytest.raises(AssertionError, match="somebody looked"):
        compared(H2O(), "24", texts([(40, 14)]), RecencyWindow())
