"""Per-slot state that a kept set holds once: it lies with its entries through cuts, growth, decode, padding and rows
that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from twin_comparison import forward

from evictbench.cache.new_cache import new_cache
from evictbench.cache.slots.placement import Placement
from evictbench.errors import UserError
from evictbench.generation.generator import Generator, Request
from evictbench.policy import Granularity, MemoryTensor, ModelShape, NewEntries, Policy, SlotTensor, Step
from evictbench.policy.budget import Budget
from twin import random_tokens, tiny_model

pytestmark = pytest.mark.engine

FILL = -7.0
SHARES: list[Granularity] = ["head", "layer", "model"]


class NoText:
    """The part of a tokenizer that generation needs."""

    eos_token_id = None

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens))


class Witness(Policy):
    """Writes into each slot's shared state whose slot it is, and looks at every later pass whether that still holds.

    name: the entry's position; passes: how often a layer of the set has seen it; wide: both, and the fill. seen: how
    many tokens the whole sequence has. own: the position again, in each layer, held only while the prompt is.
    """

    name = "witness"
    summary = "a test"
    paper = "-"

    def __init__(self, shares: Granularity, prefill: str = "dense") -> None:
        super().__init__()
        self.granularity = shares
        self.prefill = prefill  # type: ignore[misc, assignment]
        self.cuts = 0

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        return {"own": SlotTensor(torch.int32, while_dense=True)}

    def shared_state(self, shape: ModelShape) -> Mapping[str, SlotTensor | MemoryTensor]:
        return {
            "name": SlotTensor(torch.int32, fill=FILL),
            "passes": SlotTensor(torch.float32),
            "wide": SlotTensor(torch.float64, width=3, fill=FILL),
            "seen": MemoryTensor(torch.int64, (2,), fill=FILL),
        }

    def enter(self, entering: NewEntries) -> Mapping[str, Tensor]:
        return {"own": entering.positions[:, None].expand(-1, entering.shape.kv_heads, -1)}

    def observe(self, step: Step) -> None:
        positions, shared = step.positions, step.shared
        sets = step.shape.kv_heads if self.granularity == "head" else 1
        assert positions.shape[1] == sets
        assert shared["name"].shape == shared["passes"].shape == positions.shape
        assert shared["wide"].shape == (*positions.shape, 3)
        filled = positions >= 0
        assert ("own" in step.state) == step.dense
        if step.dense:
            assert (
                torch.equal(step.state["own"], positions.clamp(min=-1).expand_as(step.state["own"])) or not filled.all()
            )
        if self.granularity != "model" or step.layer == 0:
            first = step.query_positions.masked_fill(step.query_positions < 0, 10**6).amin(-1)[:, None, None]
            new = filled & (positions >= first)
            assert int(new.sum()) == int((step.query_positions >= 0).sum()) * sets
            old = filled & ~new
            # What is old lies where its entry lies; what is new begins anew, whoever had the slot before.
            assert torch.equal(shared["name"][old], positions[old])
            assert torch.equal(shared["wide"][old][:, 0], positions[old].double())
            assert torch.equal(shared["wide"][old][:, 1], shared["passes"][old].double())
            assert bool((shared["wide"][old][:, 2] == FILL).all())
            assert bool((shared["name"][new] == FILL).all())
            assert bool((shared["passes"][new] == 0).all())
            assert bool((shared["wide"][new] == FILL).all())
            following = step.query_positions[:, -1, None] + 1
            before = following - (step.query_positions >= 0).sum(-1, keepdim=True)
            assert shared["seen"].shape == (len(positions), sets, 2)
            assert torch.equal(shared["seen"][..., 0], torch.where(before > 0, before, FILL).expand(-1, sets).long())
            shared["seen"].copy_(following[:, :, None].expand(-1, sets, 2))
        else:
            assert torch.equal(shared["name"][filled], positions[filled])
        shared["name"].copy_(positions)
        shared["passes"].add_(filled.float())
        shared["wide"][..., 0] = positions.double()
        shared["wide"][..., 1] = shared["passes"].double()

    def score(self, step: Step) -> Tensor:
        """A hash of the position and of the pass: old and new go, from anywhere."""
        self.cuts += 1
        if self.granularity == "model":
            assert step.layer == step.shape.layers - 1
        following = step.query_positions[:, -1, None, None].long()
        return (step.positions.long() * 7919 + following * 104729) % 101 / 101.0


@pytest.mark.parametrize("prefill", ["dense", "bounded"])
@pytest.mark.parametrize("budget", [1, 2, 9, 24, 64, "50%", "90%"])
@pytest.mark.parametrize("shares", SHARES)
def test_state_lies_with_its_entries(shares: Granularity, budget: int | str, prefill: Any) -> None:
    model, tokens = tiny_model(layers=3), random_tokens(48)
    policy = Witness(shares)
    cache = new_cache(model, policy, budget, prefill=prefill, prompt_length=40)
    for start in range(0, 40, 7):
        forward(model, cache, tokens[start : min(start + 7, 40)])
    forward(model, cache, tokens[40:])
    for token in random_tokens(30, 1):
        forward(model, cache, [token])
    forward(model, cache, random_tokens(5, 2))
    for token in random_tokens(3, 3):
        forward(model, cache, [token])
    assert policy.cuts or budget == 64


@pytest.mark.parametrize("shares", SHARES)
def test_a_share_that_grows_beyond_its_block(shares: Granularity) -> None:
    """Decode makes room in blocks of 256; old and new blocks hold the same state."""
    model = tiny_model()
    policy = Witness(shares)
    cache = new_cache(model, policy, "90%")
    forward(model, cache, random_tokens(270))
    before = cache.layers[0].capacity
    for token in random_tokens(50, 1):
        forward(model, cache, [token])
    assert cache.layers[0].capacity > before
    assert policy.cuts


@pytest.mark.parametrize("budget", [6, "60%"])
@pytest.mark.parametrize("shares", SHARES)
def test_padding_on_the_left(shares: Granularity, budget: int | str) -> None:
    model = tiny_model()
    lengths = (40, 1, 17)
    padded = torch.tensor([[0] * (40 - length) + random_tokens(length, length) for length in lengths])
    real = torch.tensor([[0] * (40 - length) + [1] * length for length in lengths])
    cache = new_cache(model, Witness(shares), budget)
    model.generate(
        padded, attention_mask=real, past_key_values=cache, max_new_tokens=25, do_sample=False, pad_token_id=0
    )
    assert cache.nbytes() == cache.bytes_held


@pytest.mark.parametrize("budget", ["9", "60%"])
@pytest.mark.parametrize("shares", SHARES)
def test_rows_that_come_and_go(shares: Granularity, budget: str) -> None:
    """Prompts are read into a row of their own and take the place of what is finished."""
    model = tiny_model()
    requests = [Request(row, tuple(random_tokens(5 + 9 * row, row)), None, 3 + 11 * (row % 3)) for row in range(6)]

    def answers(rows: int) -> dict[Any, list[int]]:
        generator = Generator(model, NoText(), Witness(shares), Budget.parse(budget), batch_size=rows, chunk=8)  # type: ignore[arg-type]
        return {done.key: list(done.tokens) for done in generator.run(requests)}

    together = answers(3)
    assert len(together) == 6
    assert together == answers(1)


@pytest.mark.parametrize("shares", SHARES)
def test_bytes_are_counted_once_for_a_kept_set(shares: Granularity) -> None:
    class Bare(Witness):
        def shared_state(self, shape: ModelShape) -> Mapping[str, SlotTensor | MemoryTensor]:
            return {}

        def observe(self, step: Step) -> None:
            assert not step.shared

    model = tiny_model(layers=3, kv_heads=2)
    held = []
    for cls in (Witness, Bare):
        cache = new_cache(model, cls(shares), 16)
        forward(model, cache, random_tokens(30))
        held.append(cache.nbytes())
        slots = cache.layers[0].capacity
    sets = {"head": 2 * 3, "layer": 3, "model": 1}[shares]
    assert held[0] - held[1] == sets * (slots * (4 + 4 + 3 * 8) + 2 * 8)


@pytest.mark.parametrize("shares", SHARES)
def test_a_reset_forgets_it(shares: Granularity) -> None:
    model = tiny_model()
    cache = new_cache(model, Witness(shares), 8)
    for _ in range(2):
        forward(model, cache, random_tokens(20))
        forward(model, cache, [1])
        cache.reset()
        assert cache.nbytes() == cache.bytes_held


def unmoved(method: str) -> Any:
    """A placement that moves its entries and leaves their shared state where it was."""
    moves = getattr(Placement, method)

    def wrong(self: Placement, *args: Any) -> None:
        state, self.state = self.state, {}
        capacity = self.capacity
        moves(self, *args)
        self.state = state
        if self.capacity != capacity:
            self.state = {
                name: tensor[:, :, torch.arange(self.capacity) % tensor.shape[2]].clone()
                for name, tensor in state.items()
            }

    return wrong


@pytest.mark.parametrize("method", ["compact", "fill_freed_slots", "copy_row"])
@pytest.mark.parametrize("shares", SHARES)
def test_state_that_stays_behind_is_found(shares: Granularity, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placement, method, unmoved(method))
    run = partial(test_state_lies_with_its_entries, budget=24, prefill="dense")
    with pytest.raises((AssertionError, UserError), match=r"observe failed: AssertionError|assert"):
        (partial(test_rows_that_come_and_go, budget="9") if method == "copy_row" else run)(shares)
