"""DMS against its twin: the same logits and the same kept positions, whatever the chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evictbench.cache.paged.cache import PagedCache
from evictbench.models.policy_weights import Weights
from evictbench.policies.dms import DMS, Settings
from evictbench.policies.dms.allotment import Calibration
from evictbench.policies.dms.gate import SeparateGate
from evictbench.policy import ModelShape
from twin.dms import borrowed, sees, separate_marks
from twin.model import dense_forward
from twin.tiny import random_tokens, tiny_model

THRESHOLD = 0.0


class Told(DMS):
    """DMS whose gate says what it is told, by layer, KV head and position."""

    taps = frozenset()  # type: ignore[assignment]

    def __init__(self, marks: torch.Tensor, window: int, sinks: int = 0) -> None:
        super().__init__(Settings(window=window, sinks=sinks))
        self.marks = marks

    def allot(self, share: float, length: int) -> float:
        return float("inf") if share >= 1 else THRESHOLD

    def expiry(self, arriving: Any) -> torch.Tensor:
        marks = self.marks[arriving.layer][:, arriving.positions.long().clamp(min=0)].transpose(0, 1)
        return super().expiry(replace(arriving, read=marks.float()))


def random_marks(layers: int, kv_heads: int, length: int, share: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((layers, kv_heads, length), generator=generator) < share


def feed(model: Any, cache: PagedCache, tokens: list[int]) -> torch.Tensor:
    start = cache.seen[0] if cache.seen else 0
    with torch.no_grad(), cache.listening():
        return model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.arange(start, start + len(tokens))[None],
            past_key_values=cache,
            use_cache=True,
        ).logits[0]


def run(model: Any, cache: PagedCache, tokens: list[int], parts: list[int]) -> torch.Tensor:
    """Logits of every token, fed in parts of these sizes and the rest one by one."""
    logits, start = [], 0
    for size in [*parts, *[1] * len(tokens)]:
        if start < len(tokens):
            logits.append(feed(model, cache, tokens[start : start + size]))
            start += size
            assert cache.nbytes() == cache.bytes_held
    return torch.cat(logits)


def kept(cache: PagedCache, layer: int, head: int, row: int = 0) -> list[int]:
    return [position for position in cache.kept(layer, row)[head].tolist() if position >= 0]


@pytest.mark.engine
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
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

    cache = PagedCache(model, Told(marks, window, sinks), "50%", prompt_length=parts[0] if parts else 1)
    ours = run(model, cache, tokens, parts)
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
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
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
    cache = PagedCache(model, policy, "50%", prompt_length=parts[0] if parts else 1)
    ours = run(model, cache, tokens, parts)
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
    cache = PagedCache(model, policy, "100%", prompt_length=parts[0] if parts else 1)
    policy.allot = lambda share, length: 0.0  # type: ignore[method-assign]
    ours = run(model, cache, tokens, parts)
    marks, logits = borrowed(model, tokens, threshold=0.0, window=5)
    assert 0 < sum(marks.values()) < len(marks)
    torch.testing.assert_close(ours, logits, atol=1e-9, rtol=0)


def test_a_budget_of_everything_evicts_nothing() -> None:
    model = tiny_model("qwen3")
    tokens = random_tokens(50)
    marks = torch.ones((2, 2, 60), dtype=torch.bool)
    full = dense_forward(model, tokens).logits
    for budget in ("100%", 50, 500):
        cache = PagedCache(model, Told(marks, 3), budget, prompt_length=30)
        torch.testing.assert_close(run(model, cache, tokens, [30]), full, atol=1e-9, rtol=0)
    cut = PagedCache(model, Told(marks, 3), 20, prompt_length=30)
    assert not torch.allclose(run(model, cut, tokens, [30]), full, atol=1e-3)


def test_a_freed_slot_takes_the_next_entry() -> None:
    model = tiny_model("llama")
    marks = torch.ones((2, 2, 300), dtype=torch.bool)
    cache = PagedCache(model, Told(marks, 16), "50%", prompt_length=20)
    run(model, cache, random_tokens(40), [20])
    pool = cache.layers[0].pool
    assert pool is not None
    held = pool.pages
    run(model, cache, random_tokens(200, seed=1), [])
    assert pool.pages == held
    assert all(len(table) == 2 for table in pool.tables)
    assert kept(cache, 0, 0) == list(range(240 - 16, 240))


def test_occupancy_is_what_the_heads_of_decode_queries_saw() -> None:
    model = tiny_model("llama")
    length, prompt, window = 70, 40, 4
    marks = random_marks(2, 2, length + 1, 0.6, 1)
    marks[0, 0] = False
    cache = PagedCache(model, Told(marks, window), "50%", prompt_length=prompt)
    run(model, cache, random_tokens(length), [25, 15])

    def mark(layer: int, head: int, position: int) -> bool:
        return bool(marks[layer, head, position])

    counts = [
        [len(sees(mark, layer, head, query, window)) for layer in range(2) for head in range(2)]
        for query in range(prompt, length)
    ]
    seen = cache.occupancy[0]
    assert seen.steps == length - prompt
    assert seen.largest == max(map(max, counts)) == length
    assert seen.total == pytest.approx(sum(sum(heads) / 4 for heads in counts))


def test_left_padded_batches_in_generate() -> None:
    model = tiny_model("llama")
    marks = random_marks(2, 2, 200, 0.7, 5)
    prompts = [random_tokens(9, 1), random_tokens(31, 2), random_tokens(1, 3)]
    alone = []
    for prompt in prompts:
        cache = PagedCache(model, Told(marks, 5), "50%")
        with cache.listening():
            out = model.generate(
                torch.tensor([prompt]), past_key_values=cache, max_new_tokens=20, do_sample=False, pad_token_id=0
            )
        alone.append(out[0, len(prompt) :].tolist())
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    for chunk in (None, 8):
        cache = PagedCache(model, Told(marks, 5), "50%")
        with cache.listening():
            out = model.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=20,
                do_sample=False,
                pad_token_id=0,
                prefill_chunk_size=chunk,
            )
        assert out[:, longest:].tolist() == alone


def test_rows_come_and_go() -> None:
    from evictbench.generation.batching import admit, release

    model = tiny_model("llama")
    marks = random_marks(2, 2, 400, 0.7, 7)
    texts = [random_tokens(n, n) for n in (100, 41, 73, 160, 25)]
    prompts = [40, 5, 60, 90, 20]
    expected = [
        run(model, PagedCache(model, Told(marks, 6), "50%", prompt_length=p), text, [p])
        for text, p in zip(texts, prompts, strict=True)
    ]
    cache = PagedCache(model, Told(marks, 6), "50%", rows=2)
    waiting, active = list(range(len(texts))), []
    while waiting or active:
        while waiting and len(active) < 2:
            index = waiting.pop(0)
            prompt = PagedCache(model, Told(marks, 6), "50%", prompt_length=prompts[index])
            feed(model, prompt, texts[index][: prompts[index]])
            assert admit(cache, prompt) == len(active)
            active.append(index)
        tokens = [[texts[index][cache.seen[row]]] for row, index in enumerate(active)]
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor(tokens),
                position_ids=torch.tensor(cache.seen)[:, None],
                past_key_values=cache,
                use_cache=True,
            ).logits[:, 0]
        for row, index in enumerate(active):
            torch.testing.assert_close(logits[row], expected[index][cache.seen[row] - 1], atol=1e-9, rtol=0)
        assert cache.nbytes() == cache.bytes_held
        for row in range(len(active) - 1, -1, -1):
            if cache.seen[row] == len(texts[active[row]]):
                release(cache, row)
                active[row] = active[-1]
                active.pop()


def test_bytes_are_within_15_percent_of_the_entries_kept() -> None:
    model = tiny_model("llama", head_dim=64, kv_heads=4, groups=1)
    marks = torch.rand((2, 4, 900), generator=torch.Generator().manual_seed(0)) < torch.linspace(0.4, 0.9, 4)[:, None]
    cache = PagedCache(model, Told(marks, 64), "50%", prompt_length=600)
    tokens = random_tokens(800)
    run(model, cache, tokens[:600], [256, 256, 88])
    for token in tokens[600:]:
        feed(model, cache, [token])
        entries = sum(len(kept(cache, layer, head)) for layer in range(2) for head in range(4))
        size = 2 * 64 * 8
        assert entries / 8 >= 150
        assert cache.nbytes() <= 1.15 * entries * size
    assert min(len(kept(cache, 0, head)) for head in range(4)) < 0.5 * max(len(kept(cache, 0, h)) for h in range(4))
