"""The generation loop: rows together equal rows alone, ends, stop strings, memory, and clocks in the right column."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.generation.generator import Completion, Generator, Request
from evictbench.policies.full import Full
from evictbench.policies.h2o import H2O
from evictbench.policies.random import Random
from evictbench.policies.snapkv import SnapKV
from evictbench.policies.streaming_llm import StreamingLLM
from evictbench.policies.tova import TOVA
from evictbench.policy import Policy
from evictbench.policy.budget import Budget
from evictbench.suite.spec import GREEDY, Sampling
from twin import tiny_model

pytestmark = pytest.mark.engine

POLICIES: list[tuple[Policy, str | None]] = [
    (Full(), None),
    (Random(Random.Config(recent=8)), "24"),
    (StreamingLLM(), "24"),
    (TOVA(), "24"),
    (H2O(), "24"),
    (H2O(), "50%"),
    (SnapKV(SnapKV.Config(window=4, kernel=3, decode="reselect")), "24"),
    (SnapKV(SnapKV.Config(window=4, kernel=3, decode="append")), "24"),
]


class Letters:
    """A tokenizer that spells token n as the n-th letter."""

    eos_token_id = None

    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(65 + int(token) % 26) for token in tokens)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def generator(policy: Policy, budget: str | None, **settings: Any) -> Generator:
    model = tiny_model()
    model.generation_config.eos_token_id = settings.pop("eos", None)
    parsed = None if budget is None else Budget.parse(budget)
    return Generator(model, Letters(), policy, parsed, **{"chunk": 7, **settings})  # type: ignore[arg-type]


def by_key(completions: Any) -> dict[Any, Completion]:
    return {completion.key: completion for completion in completions}


@pytest.mark.parametrize(("policy", "budget"), POLICIES, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("border", [False, True])
def test_rows_together_equal_rows_alone(policy: Policy, budget: str | None, border: bool) -> None:
    """Unequal prompts and lengths, more prompts than rows: rows end, move and are filled again."""
    lengths = [(40, 9), (3, 17), (61, 1), (25, 12), (33, 5), (48, 20), (1, 6)]
    requests = [
        Request(key, prompt(length, key), length - 5 if border and length > 5 else None, new)
        for key, (length, new) in enumerate(lengths)
    ]
    alone = by_key(generator(policy, budget, batch_size=1).run(requests))
    together = by_key(generator(policy, budget, batch_size=3).run(iter(requests)))
    assert together.keys() == alone.keys() == set(range(len(lengths)))
    for key, (_, new) in enumerate(lengths):
        assert together[key].tokens == alone[key].tokens
        assert len(together[key].tokens) == new
        assert together[key].truncated
        assert together[key].occupancy_max == alone[key].occupancy_max
        assert together[key].decode_steps == new - 1


@pytest.mark.parametrize("policy", [StreamingLLM(), Random(Random.Config(recent=8))], ids=lambda p: p.name)
@pytest.mark.parametrize("budget", ["24", "60%"])
@pytest.mark.parametrize("border", [None, 31])
def test_any_chunk_gives_the_token_at_a_time_result(policy: Policy, budget: str, border: int | None) -> None:
    request = Request(0, prompt(60), border, 10)
    tokens = {chunk: next(generator(policy, budget, chunk=chunk).run([request])) for chunk in (1, 2, 7, 16, 60)}
    assert len({completion.tokens for completion in tokens.values()}) == 1
    assert len({completion.occupancy_mean for completion in tokens.values()}) == 1


def test_b3_both_protocols_keep_different_sets() -> None:
    """The question seen or unseen by the policy: the same sample keeps other tokens."""
    model, tokens = tiny_model(), list(prompt(60))
    kept = {}
    for name, border in (("seen", 60), ("unseen", 45)):
        cache = new_cache(model, TOVA(), 24, prompt_length=border)
        with torch.no_grad():
            for start, stop in ((0, border), (border, 60)):
                if start < stop:
                    positions = torch.arange(start, stop)[None]
                    model(input_ids=torch.tensor([tokens[start:stop]]), position_ids=positions, past_key_values=cache)
        kept[name] = [cache.kept(layer).tolist() for layer in range(2)]
    assert kept["seen"] != kept["unseen"]


def test_b10_a_first_token_that_ends_the_answer_leaves_none() -> None:
    """And the tokens that follow are counted right: the end itself is not one of them."""
    plain = next(generator(Full(), None).run([Request(0, prompt(20), None, 8)]))
    first = next(generator(Full(), None, eos=plain.tokens[0]).run([Request(0, prompt(20), None, 8)]))
    assert first.tokens == ()
    assert first.text == ""
    assert not first.truncated
    assert first.decode_steps == 0
    late = plain.tokens[5]
    ended = next(generator(Full(), None, eos=[late]).run([Request(0, prompt(20), None, 8)]))
    until = plain.tokens.index(late)
    assert ended.tokens == plain.tokens[:until]
    assert not ended.truncated


def test_a_stop_string_ends_one_row_and_is_cut() -> None:
    plain = by_key(generator(Full(), None).run([Request(key, prompt(20, key), None, 12) for key in range(3)]))
    stop = plain[1].text[4:6]
    requests = [Request(key, prompt(20, key), None, 12, (stop,) if key == 1 else ()) for key in range(3)]
    stopped = by_key(generator(Full(), None, batch_size=3).run(requests))
    assert stopped[1].text == plain[1].text[: plain[1].text.index(stop)]
    assert not stopped[1].truncated
    assert len(stopped[1].tokens) < 12
    assert stopped[0].text == plain[0].text
    assert stopped[2].text == plain[2].text


def test_out_of_memory_halves_the_rows_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(key, prompt(20 + key, key), None, 9) for key in range(7)]
    expected = by_key(generator(H2O(), "16", batch_size=1).run(requests))
    ours = generator(H2O(), "16", batch_size=6)
    forward, most = ours.runner.forward, 2

    def scarce(cache: Any, tokens: list[list[int]], starts: list[int]) -> Any:
        if len(tokens) > most:
            raise torch.OutOfMemoryError("not enough")
        return forward(cache, tokens, starts)

    monkeypatch.setattr(ours.runner, "forward", scarce)
    completions = list(ours.run(requests))
    got = by_key(completions)
    assert len(completions) == len(requests), "each once"
    assert {key: completion.tokens for key, completion in got.items()} == {
        key: completion.tokens for key, completion in expected.items()
    }
    assert ours.batch_size <= most

    monkeypatch.setattr(ours.runner, "forward", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("none")))
    with pytest.raises(torch.OutOfMemoryError):
        list(ours.run(requests))


def test_the_caller_is_not_left_in_inference_mode() -> None:
    completions = generator(Full(), None).run([Request(key, prompt(9), None, 3) for key in range(2)])
    next(completions)
    assert not torch.is_inference_mode_enabled()


def test_a_cache_refuses_a_model_that_attends_elsewhere() -> None:
    """Another attention function would read the new tokens only, and nobody would notice."""
    model = tiny_model()
    cache = new_cache(model, Full())
    model.set_attn_implementation("sdpa")
    with pytest.raises(UserError, match="set_attn_implementation"):
        model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
    with pytest.raises(UserError, match="Beam search"):
        model.generate(
            torch.tensor([[1, 2, 3]]), past_key_values=new_cache(model, Full()), num_beams=2, max_new_tokens=4
        )


def test_bad_settings_are_sentences() -> None:
    for settings in ({"chunk": 0}, {"batch_size": 0}):
        with pytest.raises(UserError, match="1"):
            generator(Full(), None, **settings)
    with pytest.raises(UserError, match="needs a budget"):
        list(generator(H2O(), None).run([Request(0, prompt(5), None, 1)]))
    with pytest.raises(UserError, match="no tokens"):
        list(generator(Full(), None).run([Request(0, (), None, 1)]))


def sleepy(ours: Generator, prefill: float, decode: float) -> None:
    """Make forward passes take a known time: one with many tokens `prefill`, one with a token a row `decode`."""
    forward = ours.runner.forward

    def slow(cache: Any, tokens: list[list[int]], starts: list[int]) -> Any:
        time.sleep(prefill if len(tokens[0]) > 1 else decode)
        return forward(cache, tokens, starts)

    ours.runner.forward = slow  # type: ignore[method-assign]


def test_d1_d3_prefill_first_token_and_decode_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock that only sleeping moves, each second lands in the right column."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    ours = generator(StreamingLLM(), "24", chunk=100, batch_size=2)
    sleepy(ours, prefill=5.0, decode=0.5)
    done = by_key(ours.run([Request(0, prompt(50), None, 9), Request(1, prompt(50, 1), None, 5)]))
    assert done[0].prefill_seconds == done[0].first_token_seconds == 5.0
    # Four steps in company count half, the other four whole; the first token belongs to the prefill.
    assert done[1].decode_steps == 4
    assert done[1].decode_seconds == pytest.approx(4 * 0.25)
    assert done[0].decode_steps == 8
    assert done[0].decode_seconds == pytest.approx(4 * 0.25 + 4 * 0.5)


class Waits(TorchDispatchMode):
    """Counts the reads of a tensor's value, each of which would make a GPU wait."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "budget"), POLICIES, ids=lambda value: getattr(value, "name", value))
def test_d2_no_layer_waits_for_the_device(policy: Policy, budget: str | None) -> None:
    """Once a step is the end of a phase; a wait in every layer would be part of what is measured."""
    model = tiny_model()
    cache = new_cache(model, policy, budget)
    with torch.no_grad(), Waits() as waits:
        for start, stop in ((0, 40), *((at, at + 1) for at in range(40, 60))):
            positions = torch.arange(start, stop)[None]
            tokens = torch.tensor([list(prompt(60)[start:stop])])
            model(input_ids=tokens, position_ids=positions, past_key_values=cache)
    assert waits.count == 0


def test_d4_the_peak_is_of_this_prompt_alone() -> None:
    """A long prompt before a short one does not raise the short one's peak, and the cache is counted apart."""
    requests = [Request(0, prompt(300), None, 3), Request(1, prompt(30, 1), None, 3)]
    both = by_key(generator(H2O(), "24", batch_size=1).run(requests))
    alone = by_key(generator(H2O(), "24", batch_size=1).run(requests[1:]))
    assert both[1].prefill_peak_bytes == alone[1].prefill_peak_bytes
    assert both[0].prefill_peak_bytes > 5 * both[1].prefill_peak_bytes
    assert both[0].cache_bytes == both[1].cache_bytes


@pytest.mark.parametrize(("policy", "budget"), POLICIES[::3], ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7)], ids=["greedy", "sampled"])
def test_no_end_token_comes_before_its_time(policy: Policy, budget: str | None, sampling: Sampling) -> None:
    """What would end an answer at once is passed over, row by row, for as many tokens as asked; then it ends it."""
    plain = next(generator(policy, budget).run([Request(0, prompt(40), None, 9, sampling=sampling)]))
    model_end, own_end = plain.tokens[0], plain.tokens[1]
    requests = [
        Request(0, prompt(40), None, 9, sampling=sampling, ends=(own_end,)),
        Request(1, prompt(40), None, 9, sampling=sampling, ends=(own_end,), min_new_tokens=1),
        Request(2, prompt(40), None, 9, sampling=sampling, ends=(own_end,), min_new_tokens=9),
    ]
    alone = by_key(generator(policy, budget, eos=model_end, batch_size=1).run(requests))
    together = by_key(generator(policy, budget, eos=model_end, batch_size=4).run(requests))
    assert {key: one.tokens for key, one in together.items()} == {key: one.tokens for key, one in alone.items()}
    assert together[0].tokens == ()
    assert len(together[1].tokens) >= 1
    assert not {model_end, own_end} & set(together[1].tokens)
    assert len(together[2].tokens) == 9
    assert not {model_end, own_end} & set(together[2].tokens)


def test_the_only_likely_tokens_may_be_banned() -> None:
    """Greedy takes the likeliest of those that are left, which the logits of a plain run name."""
    ours = generator(Full(), None)
    _, logits = ours.runner.prefill(prompt(20))
    ranked = [int(token) for token in logits.argsort(descending=True)]
    for banned in (1, 2, 5):
        request = Request(0, prompt(20), None, 1, ends=tuple(ranked[:banned]), min_new_tokens=1)
        assert next(generator(Full(), None).run([request])).tokens == (ranked[banned],)
