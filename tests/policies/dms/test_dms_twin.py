"""DMS against its twin: the same logits and the same kept positions, whatever the chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from twin_comparison import check_rows_that_come_and_go, examples, forward, forward_in_parts, generate_padded, kept

from evictbench.cache.new_cache import new_cache
from evictbench.models.policy_weights import Weights
from evictbench.policies.dms import DMS, Settings
from evictbench.policies.dms.allotment import Calibration
from evictbench.policies.dms.gate import SeparateGate
from evictbench.policy import ModelShape, NewEntries
from twin.dms import borrowed, sees, separate_marks
from twin.model import dense_forward
from twin.tiny import random_tokens, tiny_model

THRESHOLD = 0.0


class Told(DMS):
    """DMS whose gate says what it is told, by layer, KV head and position."""

    hooks = frozenset()  # type: ignore[assignment]

    def __init__(self, marks: torch.Tensor, window: int, sinks: int = 0) -> None:
        super().__init__(Settings(window=window, sinks=sinks))
        self.marks = marks

    def allot(self, share: float, length: int) -> float:
        return float("inf") if share >= 1 else THRESHOLD

    def expiry(self, entries: NewEntries) -> torch.Tensor:
        marks = self.marks[entries.layer][:, entries.positions.long().clamp(min=0)].transpose(0, 1)
        return super().expiry(replace(entries, activation=marks.float()))


def random_marks(layers: int, kv_heads: int, length: int, share: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((layers, kv_heads, length), generator=generator) < share


@pytest.mark.engine
@examples(40)
@given(
    length=st.integers(1, 60),
    parts=st.lists(st.integers(1, 40), max_size=4),
    window=st.integers(1, 12),
    sinks=st.integers(0, 4),
    share=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    seed=st.integers(0, 10),
    kind=st.sampled_from(["llama", "qwen3"]),
)
def test_marks_decide_what_is_seen(
    length: int, parts: list[int], window: int, sinks: int, share: float, seed: int, kind: Any
) -> None:
    model = tiny_model(kind)
    tokens = random_tokens(length, seed)
    marks = random_marks(2, 2, length + 1, share, seed)

    def mark(layer: int, head: int, position: int) -> bool:
        return bool(marks[layer, head, position])

    cache = new_cache(model, Told(marks, window, sinks), "50%", prompt_length=parts[0] if parts else 1)
    ours = forward_in_parts(model, cache, tokens, parts)
    twin = dense_forward(model, tokens, lambda layer, head, q: sees(mark, layer, head, q, window, sinks))
    torch.testing.assert_close(ours, twin.logits, atol=1e-9, rtol=0)
    # What the next query can see of the past, whose last token is still undecided.
    undecided = torch.cat((marks[..., :length], torch.zeros(2, 2, 1, dtype=torch.bool)), dim=-1)

    def told(layer: int, head: int, position: int) -> bool:
        return bool(undecided[layer, head, position])

    for layer in range(2):
        for head in range(2):
            assert kept(cache, layer, head) == sees(told, layer, head, length, window, sinks)[:-1]


def gate_weights(hidden: int, seed: int, layers: int = 2, kv_heads: int = 2) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((layers, kv_heads, hidden), generator=generator) * 0.05
    bias = torch.full((layers, kv_heads), 0.05)
    card = {
        "policy": "dms",
        "variant": "",
        "settings": {"window": 6, "sinks": 2, "epsilon": 1e-5},
        "calibration": {"thresholds": [10.0, 0.0, -10.0], "beyond": [0.9, 0.5, 0.1]},
    }
    return Weights({"weight": weight, "bias": bias}, card, "a test", "0")


@pytest.mark.engine
@examples(10)
@given(length=st.integers(1, 50), parts=st.lists(st.integers(1, 30), max_size=3), seed=st.integers(0, 5))
def test_the_separate_gate_reads_each_layers_input(length: int, parts: list[int], seed: int) -> None:
    model = tiny_model("llama")
    tokens = random_tokens(length, seed)
    weights = gate_weights(model.config.hidden_size, seed)
    policy = DMS()
    policy.use(weights, ModelShape.of(model.config))
    gate = policy._gate
    assert isinstance(gate, SeparateGate)
    policy._gate = SeparateGate(gate.weight.double(), gate.bias.double(), gate.epsilon)
    policy._calibration = Calibration.published(2)
    cache = new_cache(model, policy, "50%", prompt_length=parts[0] if parts else 1)
    ours = forward_in_parts(model, cache, tokens, parts)
    marks = separate_marks(
        model,
        tokens,
        weights.tensors["weight"].double(),
        weights.tensors["bias"].double(),
        threshold=0.0,
        window=6,
        sinks=2,
        epsilon=1e-5,
    )
    if length > 30:
        assert 0 < sum(marks.values()) < len(marks)
    twin = dense_forward(model, tokens, lambda la, h, q: sees(lambda *at: marks[at], la, h, q, 6, 2))
    torch.testing.assert_close(ours, twin.logits, atol=1e-9, rtol=0)


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("parts", [[], [40], [7, 20]])
def test_the_borrowed_gate_reads_a_channel_and_takes_it_away(kind: Any, parts: list[int]) -> None:
    model = tiny_model(kind)
    tokens = random_tokens(48, 3)
    policy = DMS(Settings(window=5, gate="borrowed"))
    cache = new_cache(model, policy, "100%", prompt_length=parts[0] if parts else 1)
    policy.allot = lambda share, length: 0.0  # type: ignore[method-assign]
    ours = forward_in_parts(model, cache, tokens, parts)
    marks, logits = borrowed(model, tokens, threshold=0.0, window=5)
    assert 0 < sum(marks.values()) < len(marks)
    torch.testing.assert_close(ours, logits, atol=1e-9, rtol=0)


def test_a_budget_of_everything_evicts_nothing() -> None:
    model = tiny_model("qwen3")
    tokens = random_tokens(50)
    marks = torch.ones((2, 2, 60), dtype=torch.bool)
    full = dense_forward(model, tokens).logits
    for budget in ("100%", 50, 500):
        cache = new_cache(model, Told(marks, 3), budget, prompt_length=30)
        torch.testing.assert_close(forward_in_parts(model, cache, tokens, [30]), full, atol=1e-9, rtol=0)
    cut = new_cache(model, Told(marks, 3), 20, prompt_length=30)
    assert not torch.allclose(forward_in_parts(model, cut, tokens, [30]), full, atol=1e-3)


def test_a_freed_slot_takes_the_next_entry() -> None:
    model = tiny_model("llama")
    marks = torch.ones((2, 2, 300), dtype=torch.bool)
    cache = new_cache(model, Told(marks, 16), "50%", prompt_length=20)
    forward_in_parts(model, cache, random_tokens(40), [20])
    pool = cache.layers[0].pool
    assert pool is not None
    held = pool.pages
    forward_in_parts(model, cache, random_tokens(200, seed=1), [])
    assert pool.pages == held
    assert all(len(table) == 2 for table in pool.tables)
    assert kept(cache, 0, 0) == list(range(240 - 16, 240))


def test_occupancy_is_what_the_heads_of_decode_queries_saw() -> None:
    model = tiny_model("llama")
    length, prompt, window = 70, 40, 4
    marks = random_marks(2, 2, length + 1, 0.6, 1)
    marks[0, 0] = False
    cache = new_cache(model, Told(marks, window), "50%", prompt_length=prompt)
    forward_in_parts(model, cache, random_tokens(length), [25, 15])

    def mark(layer: int, head: int, position: int) -> bool:
        return bool(marks[layer, head, position])

    counts = [
        [len(sees(mark, layer, head, query, window)) for layer in range(2) for head in range(2)]
        for query in range(prompt, length)
    ]
    seen = cache.rows[0].occupancy
    assert seen.steps == length - prompt
    assert seen.largest == max(map(max, counts)) == length
    assert seen.total == pytest.approx(sum(sum(heads) / 4 for heads in counts))


def test_left_padded_batches_in_generate() -> None:
    model = tiny_model("llama")
    marks = random_marks(2, 2, 200, 0.7, 5)
    prompts = [random_tokens(9, 1), random_tokens(31, 2), random_tokens(1, 3)]

    def answers(some: list[list[int]], **options: Any) -> list[list[int]]:
        return generate_padded(model, new_cache(model, Told(marks, 5), "50%"), some, **options)

    alone = [answers([prompt])[0] for prompt in prompts]
    for chunk in (None, 8):
        assert answers(prompts, prefill_chunk_size=chunk) == alone


def test_rows_come_and_go() -> None:
    model = tiny_model("llama")
    marks = random_marks(2, 2, 400, 0.7, 7)
    texts = [random_tokens(n, n) for n in (100, 41, 73, 160, 25)]
    prompts = [40, 5, 60, 90, 20]
    check_rows_that_come_and_go(
        model,
        lambda length: new_cache(model, Told(marks, 6), "50%", prompt_length=length),
        new_cache(model, Told(marks, 6), "50%", rows=2),
        texts,
        prompts,
    )


def test_bytes_are_within_15_percent_of_the_entries_kept() -> None:
    model = tiny_model("llama", head_dim=64, kv_heads=4, groups=1)
    marks = torch.rand((2, 4, 900), generator=torch.Generator().manual_seed(0)) < torch.linspace(0.4, 0.9, 4)[:, None]
    cache = new_cache(model, Told(marks, 64), "50%", prompt_length=600)
    tokens = random_tokens(800)
    forward_in_parts(model, cache, tokens[:600], [256, 256, 88])
    for token in tokens[600:]:
        forward(model, cache, [token])
        entries = sum(len(kept(cache, layer, head)) for layer in range(2) for head in range(4))
        size = 2 * 64 * 8
        assert entries / 8 >= 150
        assert cache.nbytes() <= 1.15 * entries * size
    assert min(len(kept(cache, 0, head)) for head in range(4)) < 0.5 * max(len(kept(cache, 0, h)) for h in range(4))
