"""The softmax rows of a pass's last queries, as the engine shows them, against a dense forward under the same mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from evictbench.cache.new_cache import new_cache
from evictbench.policy import Granularity, Policy, Step, tiles
from twin.model import dense_forward
from twin.tiny import random_tokens, tiny_model

LAST = 6


class Watcher(Policy):
    """Keeps what it was shown: of each layer, rows `[rows, heads, LAST, slots]` and the slots' positions."""

    name = "watcher"
    summary = "a test"
    paper = "-"
    signals = frozenset({"recent_probs"})

    def __init__(self, shares: Granularity, parts: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.granularity = shares
        self.parts = parts
        self.shown: list[tuple[Tensor, Tensor]] = []

    def observe(self, step: Step) -> None:
        ask = step.signals.recent_probs
        assert ask is not None
        probs = torch.cat([ask(count, before) for count, before in self.parts], dim=-2)
        self.shown.append((probs.flatten(1, 2).clone(), step.positions.clone()))

    def score(self, step: Step) -> Tensor:
        following = step.query_positions[:, -1, None, None].long()
        return (step.positions.long() * 7919 + following * 104729) % 101 / 101.0


@pytest.mark.parametrize("tile", [1, 300, 2**19])
@pytest.mark.parametrize("parts", [((LAST, 0),), ((2, 4), (1, 3), (3, 0))])
@pytest.mark.parametrize("shares", ["head", "layer", "model"])
def test_rows_are_those_of_a_masked_dense_forward(
    shares: Granularity, parts: Any, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", tile)
    model = tiny_model("qwen3", 2, layers=3, kv_heads=2, groups=3)
    policy = Watcher(shares, parts)
    cache = new_cache(model, policy, 12, prompt_length=20)
    tokens = random_tokens(34)
    saw: dict[tuple[int, int, int], list[int]] = {}
    passes = [range(0, 11), range(11, 20), range(20, 24), *(range(n, n + 1) for n in range(24, 32)), range(32, 34)]
    shown: list[list[tuple[Tensor, Tensor]]] = []
    for queries in passes:
        held = [cache.kept(layer).expand(2, -1).tolist() for layer in range(3)] if cache.seen else [[[], []]] * 3
        for layer in range(3):
            for kv_head in range(2):
                for query in queries:
                    saw[layer, kv_head, query] = [*held[layer][kv_head], *range(queries.start, query + 1)]
        policy.shown = []
        with torch.no_grad():
            model(
                input_ids=torch.tensor([tokens[queries.start : queries.stop]]),
                position_ids=torch.arange(queries.start, queries.stop)[None],
                past_key_values=cache,
            )
        shown.append(policy.shown)
    whole = dense_forward(model, tokens, lambda layer, kv_head, query: saw[layer, kv_head, query])
    for queries, layers in zip(passes, shown, strict=True):
        for layer, (probs, positions) in enumerate(layers):
            for head in range(6):
                places = positions.expand(1, 2, -1)[0, head // 3]
                for back in range(LAST):
                    row, query = probs[0, head, LAST - 1 - back], queries.stop - 1 - back
                    if query < queries.start:
                        assert not row.any()
                        continue
                    expected = whole.probs[layer][head, query, places.clamp(min=0).long()] * (places >= 0)
                    torch.testing.assert_close(row, expected, atol=1e-9, rtol=0)


def test_padding_has_no_rows() -> None:
    model = tiny_model(layers=2, kv_heads=2, groups=2)
    prompts = [random_tokens(9, 1), random_tokens(4, 2)]
    policy = Watcher("model", ((LAST, 0),))
    cache = new_cache(model, policy, 30)
    padded = torch.tensor([prompts[0], [0] * 5 + prompts[1]])
    real = torch.tensor([[1] * 9, [0] * 5 + [1] * 4])
    with torch.no_grad():
        model(
            input_ids=padded,
            attention_mask=real,
            position_ids=(real.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
        )
    for row, prompt in enumerate(prompts):
        whole = dense_forward(model, prompt)
        for layer, (probs, positions) in enumerate(policy.shown):
            places = positions[row, 0]
            for back in range(LAST):
                shown, query = probs[row, :, LAST - 1 - back], len(prompt) - 1 - back
                if query < 0:
                    assert not shown.any()
                    continue
                expected = whole.probs[layer][:, query, places.clamp(min=0).long()] * (places >= 0)
                torch.testing.assert_close(shown, expected, atol=1e-9, rtol=0)
