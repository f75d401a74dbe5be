"""DMS decodes a token of all rows in all layers at once: the same as reading each token as a chunk, layer by layer."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_dms_twin import gate_weights
from twin_comparison import examples, forward

from evictbench.cache.new_cache import new_cache
from evictbench.cache.paged import stack
from evictbench.cache.paged.expiry import ExpiryCache
from evictbench.cache.paged.pool import PAGE
from evictbench.policies.dms import DMS, Settings
from evictbench.policies.dms.gate import SeparateGate
from evictbench.policy import ModelShape, NewEntries
from twin.tiny import random_tokens, tiny_model


class AtZero(DMS):
    """DMS with a threshold of 0 whatever the budget."""

    def allot(self, share: float, length: int) -> float:
        return 0.0


def build(cls: type[DMS], model: Any, gate: str, window: int, sinks: int, seed: int) -> DMS:
    if gate == "borrowed":
        return cls(Settings(window=window, sinks=sinks, gate="borrowed"))
    policy = cls(Settings(window=window, sinks=sinks, alpha_per="layer" if gate == "layer" else "head"))
    policy.use(gate_weights(model.config.hidden_size, seed), ModelShape.of(model.config))
    found = policy._gate
    assert isinstance(found, SeparateGate)
    policy._gate = SeparateGate(found.weight.double(), found.bias.double(), found.epsilon)
    return policy


def feed(model: Any, cache: ExpiryCache, tokens: list[list[int]], *, as_chunk: bool) -> torch.Tensor:
    """Logits of the next tokens of every row, `[rows, tokens, vocabulary]`.

    as_chunk: with a token of padding before them, so that even one token a row is read as a chunk.
    """
    padding = int(as_chunk)
    ids = torch.tensor([[0] * padding + row for row in tokens])
    real = torch.arange(ids.shape[1]).expand(ids.shape) >= padding
    seen = torch.ones(len(tokens), cache.columns, dtype=torch.bool)
    positions = torch.tensor(cache.seen)[:, None] + torch.arange(-padding, ids.shape[1] - padding)
    with torch.no_grad():
        logits: torch.Tensor = model(
            input_ids=ids,
            position_ids=positions.clamp(min=0),
            attention_mask=torch.cat([seen, real], dim=1).long(),
            past_key_values=cache,
            use_cache=True,
        ).logits
    assert cache.nbytes() == cache.bytes_held
    return logits[:, padding:]


def kept(cache: ExpiryCache) -> list[list[list[list[int]]]]:
    """Positions by row, layer and head."""
    return [
        [
            [[position for position in head if position >= 0] for head in cache.kept(layer, row).tolist()]
            for layer in range(cache.shape.layers)
        ]
        for row in range(len(cache.rows))
    ]


def check_slots(cache: ExpiryCache, lengths: list[list[int]]) -> list[list[int]]:
    """Filled slots by layer and owner after a decode step. lengths: before it.

    A new entry takes a new slot only where no later query misses an entry of its owner.
    """
    after: list[list[int]] = []
    for layer, before in zip(cache.layers, lengths, strict=True):
        pool = layer.pool
        assert pool is not None
        after.append(pool.length.tolist())
        for row in range(len(cache.rows)):
            for owner in cache.owners(row):
                positions, expiry = pool.entries(owner, "positions").tolist(), pool.entries(owner, "expiry").tolist()
                filled = [end for position, end in zip(positions, expiry, strict=True) if position >= 0]
                assert len(filled) == after[-1][owner]
                assert len(pool.tables[owner]) == -(-len(filled) // PAGE)
                seen_by_this = sum(end > cache.rows[row].seen - 1 for end in filled)
                assert len(filled) == max(before[owner], seen_by_this)
    return after


class Batch:
    """A batch of rows and, for each, what its decode queries saw, counted from outside."""

    def __init__(self, model: Any, policy: DMS, rows: int | None, as_chunk: bool, **settings: Any) -> None:
        cache = new_cache(model, policy, "50%", rows=rows, **settings)
        assert isinstance(cache, ExpiryCache)
        self.model, self.cache, self.as_chunk = model, cache, as_chunk
        self.seen_by_queries: list[list[tuple[int, float]]] = []

    def decode(self, tokens: list[list[int]]) -> torch.Tensor:
        cache, decodes = self.cache, len(tokens[0]) == 1 and not self.as_chunk
        if decodes:
            for row, counts in enumerate(kept(cache)):
                heads = [len(head) + 1 for layer in counts for head in layer]
                self.seen_by_queries[row].append((max(heads), sum(heads) / len(heads)))
        lengths = [layer.pool.length.tolist() if layer.pool else [] for layer in cache.layers]
        logits = feed(self.model, cache, tokens, as_chunk=self.as_chunk)
        if decodes:
            check_slots(cache, lengths)
            for row, seen in zip(cache.rows, self.seen_by_queries, strict=True):
                assert row.occupancy.steps == len(seen)
                assert row.occupancy.largest == max((largest for largest, _ in seen), default=0)
                assert row.occupancy.total == pytest.approx(sum(mean for _, mean in seen))
        return logits


def sequences(model: Any, policy: DMS, seed: int, rows: int, steps: int, as_chunk: bool) -> list[tuple[Any, Any]]:
    """Rows that come, decode, sometimes read a few tokens at once, and go: logits and what is kept, after each pass."""
    draw, found = random.Random(seed), []
    batch = Batch(model, policy, rows, as_chunk)
    cache = batch.cache
    for _ in range(steps):
        while len(cache.seen) < rows and (not cache.seen or draw.random() < 0.5):
            length = draw.randint(1, 50)
            alone = Batch(model, policy, None, as_chunk, prompt_length=length)
            forward(model, alone.cache, random_tokens(length, draw.randint(0, 99)))
            alone.seen_by_queries.append([])
            for _ in range(draw.choice((0, 0, 3))):
                found.append((alone.decode([random_tokens(1, draw.randint(0, 99))]), kept(alone.cache)))
            cache.admit(alone.cache)
            batch.seen_by_queries.append([])
        new = draw.choice((1, 1, 1, 1, 1, 1, 1, 4))
        logits = batch.decode([random_tokens(new, draw.randint(0, 99)) for _ in cache.seen])
        found.append((logits, kept(cache)))
        if draw.random() < 0.1:
            gone = draw.randrange(len(cache.seen))
            cache.release(gone)
            batch.seen_by_queries[gone] = batch.seen_by_queries[-1]
            batch.seen_by_queries.pop()
    return found


@pytest.mark.engine
@examples(40)
@given(
    rows=st.integers(1, 4),
    steps=st.integers(1, 60),
    window=st.integers(1, 20),
    sinks=st.integers(0, 4),
    gate=st.sampled_from(["head", "layer", "borrowed"]),
    few_pairs=st.sampled_from([0, stack.FEW_PAIRS]),
    kind=st.sampled_from(["llama", "qwen3"]),
    seed=st.integers(0, 1000),
)
def test_all_layers_at_once_are_as_chunks_layer_by_layer(
    rows: int, steps: int, window: int, sinks: int, gate: str, few_pairs: int, kind: Any, seed: int
) -> None:
    model = tiny_model(kind)
    policy = build(AtZero, model, gate, window, sinks, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "FEW_PAIRS", few_pairs)
        at_once, as_chunks = (sequences(model, policy, seed, rows, steps, as_chunk) for as_chunk in (False, True))
    for (ours, has), (expected, had) in zip(at_once, as_chunks, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=0)
        assert has == had


@pytest.mark.engine
@pytest.mark.parametrize(("first", "seed"), [(5, 0), *((0, seed) for seed in range(8))])
def test_a_row_may_have_had_nothing(first: int, seed: int) -> None:
    """A batch whose second row is all padding until the prompt has ended."""
    model = tiny_model("llama")
    policy = build(AtZero, model, "head", 9, 0, seed)
    found: list[list[tuple[Any, Any]]] = []
    for as_chunk in (False, True):
        batch = Batch(model, policy, None, as_chunk, prompt_length=12)
        batch.seen_by_queries = [[], []]
        mask = torch.ones((2, 12), dtype=torch.long)
        mask[1, : 12 - first] = 0
        ids = torch.tensor([random_tokens(12, seed), random_tokens(12, seed + 9)])
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, past_key_values=batch.cache, use_cache=True)
        found.append([])
        for step in range(15):
            logits = batch.decode([random_tokens(1, step), random_tokens(1, step + 50)])
            found[-1].append((logits, kept(batch.cache)))
    for (ours, has), (expected, had) in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=0)
        assert has == had


@pytest.mark.engine
@pytest.mark.parametrize("gate", ["head", "layer", "borrowed"])
@pytest.mark.parametrize(
    ("padding", "sizes"), [(4, [19, 1]), (4, [10, 9, 1]), (4, [8, 1, 10, 1]), (0, [1, 18, 1]), (0, [18, 1, 1])]
)
def test_a_prompt_whose_last_chunk_is_one_token(gate: str, padding: int, sizes: list[int]) -> None:
    """In a batch with padding: such a chunk is read as decode reads a token, and still belongs to the prompt."""
    model = tiny_model("qwen3")
    policy = build(AtZero, model, gate, 5, 1, 2)
    ids = torch.tensor([random_tokens(20, 1), random_tokens(20, 2)])
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found: list[tuple[torch.Tensor, list[Any]]] = []
    for parts in (sizes, [20]):
        batch = Batch(model, policy, None, False, prompt_length=20)
        batch.seen_by_queries = [[], []]
        logits = []
        for begin, end in itertools.pairwise(itertools.accumulate(parts, initial=0)):
            with torch.no_grad():
                output = batch.model(
                    input_ids=ids[:, begin:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, begin:end],
                    past_key_values=batch.cache,
                    use_cache=True,
                )
            logits.append(output.logits)
            assert batch.cache.prompt_done == (end == 20)
        held = [kept(batch.cache)]
        assert [row.occupancy.steps for row in batch.cache.rows] == [0, 0]
        for step in range(10):
            logits.append(batch.decode([random_tokens(1, step), random_tokens(1, step + 50)]))
            held.append(kept(batch.cache))
        found.append((torch.cat(logits, dim=1), held))
    (ours, has), (expected, had) = found
    real = torch.nn.functional.pad(mask, (0, 10), value=1).bool()
    torch.testing.assert_close(ours[real], expected[real], atol=1e-10, rtol=0)
    assert has == had
    assert sum(len(head) for row in has[0] for layer in row for head in layer) < 4 * 36, "nothing was evicted"


def test_the_gate_of_several_layers_is_that_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn((5, 3, 32), generator=generator), torch.randn((5, 3), generator=generator)
    gate, hidden = SeparateGate(weight, bias), torch.randn((5, 2, 1, 32), generator=generator)
    for layers in ([0, 1, 2, 3, 4], [1, 4]):
        expected = torch.stack([gate.logits(layer, hidden[layer]) for layer in layers])
        torch.testing.assert_close(gate.logits_of_layers(layers, hidden[layers]), expected, atol=2e-3, rtol=1e-5)


def test_what_a_subclass_says_of_one_layer_holds_for_all() -> None:
    class Overruled(DMS):
        def expiry(self, entries: NewEntries) -> torch.Tensor:
            return super().expiry(entries) + entries.layer

    logits, positions = torch.ones((1, 2, 1)), torch.full((1, 1), 7, dtype=torch.int32)
    shape, vectors = ModelShape(layers=2, heads=2, kv_heads=2, head_dim=8), torch.zeros((1, 2, 1, 8))
    entries = [
        NewEntries(layer, shape, positions, vectors, vectors, threshold=torch.zeros(1), activation=logits)
        for layer in range(2)
    ]
    overruled, plain = Overruled(Settings(window=3)), DMS(Settings(window=3))
    for policy in (overruled, plain):
        expected = torch.stack([policy.expiry(one_layer) for one_layer in entries])
        assert torch.equal(policy.expiry_of_layers(entries), expected)
    assert not torch.equal(overruled.expiry_of_layers(entries), plain.expiry_of_layers(entries))
