"""DistillCache where something is short, equal, padded or together; and that no matrix of the prompt's length squared
is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from largest_tensor import LargestTensor
from random_distillcache_weights import weights

from evictbench.cache.kernels import TILE_ELEMENTS
from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.generation.fidelity import Text, evaluate
from evictbench.policies.distillcache import DistillCache
from evictbench.policies.distillcache.features import ELEMENTS_AT_ONCE
from evictbench.policies.full import Full
from evictbench.policy import ModelShape
from evictbench.policy.budget import Budget
from twin.distillcache import random_ranker
from twin.tiny import random_tokens, tiny_model

SHAPE = ModelShape(2, 4, 2, 16)


def ranked(seed: int = 0, equal: bool = False, **settings: Any) -> DistillCache:
    policy = DistillCache(DistillCache.Config(**settings))
    policy.use(weights(random_ranker(seed, equal)), SHAPE)
    return policy


def generate(model: Any, policy: Any, prompts: list[list[int]], budget: Any, new: int = 20, **given: Any) -> Any:
    """New tokens a prompt, left-padded, and the cache."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache = new_cache(model, policy, budget, prompt_length=longest)
    out = model.generate(
        padded, attention_mask=real, past_key_values=cache, max_new_tokens=new, do_sample=False, pad_token_id=0, **given
    )
    assert cache.nbytes() == cache.bytes_held
    return [row[longest:].tolist() for row in out], cache


@pytest.mark.parametrize("budget", [14, "50%"])
@pytest.mark.parametrize("chunk", [None, 11])
def test_padding_on_the_left_changes_nothing(budget: Any, chunk: int | None) -> None:
    model = tiny_model("qwen3", 1, layers=3, kv_heads=2, groups=3)
    prompts = [random_tokens(length, length) for length in (75, 1, 34, 12)]
    given = {} if chunk is None else {"prefill_chunk_size": chunk}
    together, cache = generate(model, ranked(3), prompts, budget, 25, **given)
    for row, prompt in enumerate(prompts):
        alone, own = generate(model, ranked(3), [prompt], budget, 25)
        assert together[row] == alone[0]
        assert cache.kept(0, row).tolist() == own.kept(0).tolist()


@pytest.mark.parametrize("length", ["seen", "cache"])
def test_rows_together_keep_what_each_keeps_alone(length: Any) -> None:
    model = tiny_model(kv_heads=2, groups=2)
    texts = [
        Text(row, tuple(random_tokens(24 + 17 * row, row)), tuple(random_tokens(6 + 3 * row, 100 + row)))
        for row in range(5)
    ]
    for budget in ("18", "40%"):
        policy = ranked(length=length)
        alone = evaluate(model, policy, Budget.parse(budget), texts, batch_size=1)
        together = evaluate(model, policy, Budget.parse(budget), texts, batch_size=3, chunk=7)
        assert any(one.metrics["kl"] > 1e-4 for one in alone)
        for one, other in zip(alone, together, strict=True):
            assert [token.kl for token in one.divergence] == pytest.approx(
                [token.kl for token in other.divergence], abs=1e-9
            )


def test_the_cache_read_to_the_letter_in_a_padded_batch() -> None:
    """Each row's share is one of what that row holds."""
    model, prompts = tiny_model(), [random_tokens(length, length) for length in (90, 41, 1)]
    together, cache = generate(model, ranked(length="cache"), prompts, "75%", 12)
    for row, prompt in enumerate(prompts):
        alone, own = generate(model, ranked(length="cache"), [prompt], "75%", 12)
        assert together[row] == alone[0]
        assert cache.kept(0, row).tolist() == own.kept(0).tolist()
    assert [row.held for row in cache.rows[:2]] == [31, 31]


@pytest.mark.parametrize("budget", [55, 1000, "100%"])
def test_a_budget_of_the_length_is_the_full_cache(budget: Any) -> None:
    model = tiny_model("llama", 4)
    prompts = [random_tokens(35, 1), random_tokens(20, 2)]
    assert generate(model, ranked(), prompts, budget)[0] == generate(model, Full(), prompts, None)[0]


def test_of_equal_scores_the_earlier_positions_stay() -> None:
    model = tiny_model()
    _, cache = generate(model, ranked(equal=True), [random_tokens(30), random_tokens(9)], 12, 20)
    assert cache.kept(0, 0).tolist() == [list(range(11))]
    assert cache.kept(1, 1).tolist() == [list(range(11))]


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_least_budget_and_a_prompt_of_one_token(budget: int) -> None:
    model = tiny_model()
    answers, cache = generate(model, ranked(), [[5], random_tokens(9)], budget, 12)
    assert cache.kept(0, 0).shape == (1, budget - 1)
    assert [row.occupancy.largest for row in cache.rows] == [budget, budget]
    assert generate(model, ranked(), [[5]], budget, 12)[0] == answers[:1]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [({"length": "kept"}, "length is seen or cache, not 'kept'"), ({"heads": "all"}, "heads is shared or hybrid")],
)
def test_impossible_settings_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=f"distillcache: {sentence}"):
        DistillCache.Config(**given)


@pytest.mark.parametrize("chunk", [64, 4096])
def test_no_tensor_is_the_prompt_squared(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the prompt makes the largest tensor about twice as large: whole prompts at once, or in chunks."""
    monkeypatch.setitem(TILE_ELEMENTS, "cpu", 2**12)
    monkeypatch.setitem(ELEMENTS_AT_ONCE, "cpu", 2**12)
    sizes = []
    for length in (256, 512, 1024):
        model, tokens = tiny_model(), random_tokens(length)
        cache = new_cache(model, ranked(), 24, prompt_length=length)
        with LargestTensor() as mode, torch.no_grad():
            for start in range(0, length, chunk):
                part = tokens[start : start + chunk]
                model(
                    input_ids=torch.tensor([part]),
                    position_ids=torch.arange(start, start + len(part))[None],
                    past_key_values=cache,
                )
        assert cache.kept(0).shape == (1, 23)
        sizes.append(mode.elements)
    assert sizes[2] < 2.5 * sizes[1] < 6.25 * sizes[0]
    assert sizes[2] < 1024 * 1024 / 4
