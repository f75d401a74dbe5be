"""kvpop and kvpop_mlp in the engine: no eviction is full attention, any chunk, any batch, rows that move, what is
charged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_kvpop_weights import random_fit
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from twin_comparison import forward_rows, generate_padded

from evictbench.cache.base import KVCache
from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.generation.generator import Generator, Request
from evictbench.policies.full import Full
from evictbench.policies.kvpop import KVpop, KVpopMLP
from evictbench.policy import ModelShape, Policy
from evictbench.policy.budget import Budget
from twin import tiny_model

pytestmark = pytest.mark.engine

BUDGET = 28
SINKS, WINDOW, HEAD_DIM = 2, 4, 16
BOTH = pytest.mark.parametrize("cls", [KVpop, KVpopMLP])


def build(cls: type[Policy], **settings: Any) -> Policy:
    return random_fit(cls(cls.Config(**{"sinks": SINKS, "window": WINDOW, **settings})), tiny_model())


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def kept(cache: KVCache, row: int = 0) -> list[list[list[int]]]:
    return [cache.kept(layer, row).tolist() for layer in range(cache.shape.layers)]


def run(policy: Policy, tokens: tuple[int, ...], chunk: int, budget: Any, **settings: Any) -> KVCache:
    cache = new_cache(tiny_model(), policy, budget, prompt_length=len(tokens), **settings)
    for start in range(0, len(tokens), chunk):
        forward_rows(tiny_model(), cache, [list(tokens[start : start + chunk])])
    return cache


def generator(policy: Policy, budget: str, **settings: Any) -> Generator:
    class Letters:
        eos_token_id = None

        def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
            return "".join(chr(65 + int(token) % 26) for token in tokens)

    return Generator(
        tiny_model(),
        Letters(),  # type: ignore[arg-type]
        policy,
        Budget.parse(budget),
        **{"chunk": 7, **settings},
    )


@BOTH
@pytest.mark.parametrize("chunk", [60, 7, 1])
def test_a_budget_beyond_the_length_is_full_attention(cls: type[Policy], chunk: int) -> None:
    tokens = prompt(50)
    cache = new_cache(tiny_model(), build(cls), 70 + HEAD_DIM // 2, prompt_length=40)
    full = new_cache(tiny_model(), Full())
    for start in range(0, 40, chunk):
        part = [list(tokens[start : min(40, start + chunk)])]
        torch.testing.assert_close(
            forward_rows(tiny_model(), cache, part), forward_rows(tiny_model(), full, part), atol=1e-10, rtol=0
        )
    for token in tokens[40:]:
        torch.testing.assert_close(
            forward_rows(tiny_model(), cache, [[token]]),
            forward_rows(tiny_model(), full, [[token]]),
            atol=1e-10,
            rtol=0,
        )
    assert kept(cache) == [[list(range(50))] * 2] * 2


@BOTH
@pytest.mark.parametrize("budget", [str(BUDGET), "60%"])
@pytest.mark.parametrize("border", [None, 31])
def test_any_chunk_gives_the_token_at_a_time_result(cls: type[Policy], budget: str, border: int | None) -> None:
    request = Request(0, prompt(60), border, 10)
    policy = build(cls)
    found = {chunk: next(generator(policy, budget, chunk=chunk).run([request])) for chunk in (1, 2, 7, 16, 60)}
    assert len({completion.tokens for completion in found.values()}) == 1
    assert len({completion.occupancy_mean for completion in found.values()}) == 1


@BOTH
@pytest.mark.parametrize("window", [1, 4, 11])
def test_any_chunk_keeps_the_same_from_the_prompt_into_decode(cls: type[Policy], window: int) -> None:
    """The border to decode falls where tokens are still in the window: each is scored later, once."""
    policy, tokens = build(cls, window=window), prompt(53)
    follow = prompt(2 * window + 9, seed=1)
    one = run(policy, tokens, 1, BUDGET)
    others = [run(policy, tokens, chunk, BUDGET) for chunk in (2, 5, 16, 53)]
    for token in follow:
        logits = forward_rows(tiny_model(), one, [[token]])
        for other in others:
            torch.testing.assert_close(forward_rows(tiny_model(), other, [[token]]), logits, atol=1e-9, rtol=0)
            assert kept(other) == kept(one)


@BOTH
def test_the_prompt_may_end_before_anything_leaves_the_window(cls: type[Policy]) -> None:
    policy = build(cls, window=11)
    whole, tokens = prompt(60), prompt(60)
    one = run(policy, whole, 1, BUDGET)
    for border in (1, 2, 5, 11, 12, 13, 14):
        cache = run(policy, tokens[:border], 4, BUDGET)
        for token in tokens[border:]:
            forward_rows(tiny_model(), cache, [[token]])
        assert kept(cache) == kept(one), border


@BOTH
@pytest.mark.parametrize("chunk", [None, 8])
def test_a_left_padded_batch_equals_its_rows_alone(cls: type[Policy], chunk: int | None) -> None:
    model, policy = tiny_model(), build(cls)
    prompts = [list(prompt(length, row)) for row, length in enumerate((40, 29, 3))]
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None}
    together = new_cache(model, policy, BUDGET, prompt_length=40)
    answers = generate_padded(model, together, prompts, prefill_chunk_size=chunk, **options)
    for row, tokens in enumerate(prompts):
        alone = new_cache(model, policy, BUDGET, prompt_length=len(tokens))
        assert generate_padded(model, alone, [tokens], **options) == [answers[row]], f"row of {len(tokens)}"
        assert kept(together, row) == kept(alone), f"row of {len(tokens)}"


@BOTH
@pytest.mark.parametrize("border", [False, True])
def test_rows_together_equal_rows_alone(cls: type[Policy], border: bool) -> None:
    lengths = [(40, 9), (3, 27), (61, 1), (25, 12), (33, 5), (48, 20), (1, 36)]
    requests = [
        Request(key, prompt(length, key), length - 5 if border and length > 5 else None, new)
        for key, (length, new) in enumerate(lengths)
    ]
    policy = build(cls)
    alone = {done.key: done for done in generator(policy, str(BUDGET), batch_size=1).run(requests)}
    together = {done.key: done for done in generator(policy, str(BUDGET), batch_size=3).run(iter(requests))}
    for key in range(len(lengths)):
        assert together[key].tokens == alone[key].tokens
        assert together[key].occupancy_max == alone[key].occupancy_max


@BOTH
def test_what_a_sequence_remembers_moves_with_its_row(cls: type[Policy]) -> None:
    """Rows end in the middle and the last takes their place; new ones come into rows that others left."""
    policy, model = build(cls), tiny_model()
    follow = prompt(40, seed=9)
    lengths = {0: 40, 1: 23, 2: 5, 3: 31}

    def alone(key: int, steps: int) -> list[list[list[int]]]:
        cache = run(policy, prompt(lengths[key], key), 7, BUDGET)
        for token in follow[:steps]:
            forward_rows(tiny_model(), cache, [[token]])
        return kept(cache)

    cache = new_cache(model, policy, BUDGET, rows=3)
    rows: list[list[int]] = []  # [key, steps done]

    def enter(key: int) -> None:
        assert cache.admit(run(policy, prompt(lengths[key], key), 7, BUDGET)) == len(rows)
        rows.append([key, 0])

    def decode(steps: int) -> None:
        for _ in range(steps):
            forward_rows(tiny_model(), cache, [[follow[done]] for _, done in rows])
            for row in rows:
                row[1] += 1
        for row, (key, done) in enumerate(rows):
            assert kept(cache, row) == alone(key, done), (row, key)

    for key in (0, 1, 2):
        enter(key)
    decode(6)
    cache.release(0)
    rows[0] = rows.pop()
    decode(6)
    enter(3)
    decode(7)
    cache.release(2)
    rows.pop()
    decode(5)
    cache.release(0)
    rows[0] = rows.pop()
    enter(0)
    decode(9)


@BOTH
def test_two_texts_in_a_row_are_strangers(cls: type[Policy]) -> None:
    """reset() empties what the cache remembers, and the policy itself remembers nothing."""
    policy = build(cls)
    fresh = run(policy, prompt(60, 1), 7, BUDGET)
    used = run(policy, prompt(60, 0), 7, BUDGET)
    used.reset()
    for start in range(0, 60, 7):
        forward_rows(tiny_model(), used, [list(prompt(60, 1)[start : start + 7])])
    assert kept(used) == kept(fresh)


def test_the_memory_is_charged_and_counted() -> None:
    shape = ModelShape.of(tiny_model().config)
    for cls, charged in ((KVpop, HEAD_DIM // 2), (KVpopMLP, 0)):
        policy = build(cls)
        assert policy.charge(shape).fixed == charged
        cache = run(policy, prompt(60), 60, BUDGET)
        for token in prompt(10, 1):
            forward_rows(tiny_model(), cache, [[token]])
        assert cache.rows[0].occupancy.largest == BUDGET
        assert all(len(head) + 1 == BUDGET - charged for layer in kept(cache) for head in layer)
        assert cache.nbytes() == cache.bytes_held
        held = sum(layer.buffers[name].nbytes for layer in cache.layers for name in ("keys", "values"))
        if charged:
            # Of each head's memory at least the matrix, in whatever it is kept.
            assert cache.nbytes() - held >= shape.layers * shape.kv_heads * HEAD_DIM**2 * 2


@pytest.mark.parametrize(("head_dim", "charged"), [(64, 32), (128, 64)])
def test_what_is_charged_on_real_models(head_dim: int, charged: int) -> None:
    shape = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=head_dim)
    assert KVpop(KVpop.Config()).charge(shape).fixed == charged
    assert KVpopMLP(KVpopMLP.Config()).charge(shape).fixed == 0


@BOTH
def test_a_budget_that_protects_everything_is_refused(cls: type[Policy]) -> None:
    policy, shape = build(cls), ModelShape.of(tiny_model().config)
    least = SINKS + WINDOW + policy.charge(shape).fixed + 1
    assert policy.minimum_budget(shape) == least
    new_cache(tiny_model(), policy, least)
    with pytest.raises(UserError, match=f"at least {least} entries"):
        new_cache(tiny_model(), policy, least - 1)


@BOTH
@pytest.mark.parametrize("wrong", [{"window": 0}, {"sinks": -1}, {"label": "median"}])
def test_settings_that_mean_nothing_are_refused(cls: type[Policy], wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        cls.Config(**wrong)


class Touched(TorchDispatchMode):
    """Adds up the elements of all that operations return, views apart."""

    elements = 0
    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor._base is None:
                self.elements += tensor.numel()
        self.operations += 1
        return result


@BOTH
def test_a_decode_step_costs_what_the_budget_is_not_what_was_seen(cls: type[Policy]) -> None:
    policy = build(cls)

    def cost(length: int, budget: int) -> tuple[int, int]:
        cache = run(policy, prompt(length), 16, budget)
        forward_rows(tiny_model(), cache, [[1]])
        forward_rows(tiny_model(), cache, [[2]])
        with Touched() as mode:
            forward_rows(tiny_model(), cache, [[3]])
        return mode.elements, mode.operations

    assert cost(100, 40) == cost(300, 40)
    small, large = cost(300, 60), cost(300, 120)
    assert large[0] <= 2.2 * small[0]
    assert large[1] == small[1]


def test_without_weights_it_says_so() -> None:
    for cls in (KVpop, KVpopMLP):
        policy = cls(cls.Config(sinks=SINKS, window=WINDOW))
        with pytest.raises(UserError, match="no weights"):
            run(policy, prompt(60), 7, BUDGET)
