"""The oracle against its twin: labels by explicit loops, the same kept sets, the same logits."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from twin_comparison import assert_found, check, examples, run_case

from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.generation.dense_run import watch_dense_run
from evictbench.generation.fidelity import Comparison, Text, evaluate
from evictbench.generation.generator import Generator, Request
from evictbench.generation.runner import ModelRunner
from evictbench.policies.full import Full
from evictbench.policies.oracle import LEAST_LABEL, UNLABELLED, Oracle
from evictbench.policy import DenseRun, NewEntries
from evictbench.policy.budget import Budget
from twin import oracle as twin
from twin.cases import Case
from twin.oracle import oracle_cases
from twin.tiny import random_tokens, tiny_model

ROUNDING = 1e-4
"""Labels are float32: closer logarithms may be ordered either way."""


class Numbers:
    """A tokenizer that spells a token as its number."""

    eos_token_id = None

    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        return " ".join(str(int(token)) for token in tokens)


def policy_of(case: Case, cls: type[Oracle] = Oracle) -> Oracle:
    names = ("label", "shares", "sinks", "window")
    return cls(cls.Config(**{name: case.settings[name] for name in names}))


@pytest.mark.engine
@examples(150)
@given(case=oracle_cases())
def test_policy_equals_its_twin(case: Case) -> None:
    check(case, policy_of(case), exact=ROUNDING)


class NearFuture(Oracle):
    """Attention from inside the window counts too."""

    def labels(self, run: DenseRun) -> list[Tensor]:
        config = self.config
        object.__setattr__(self, "config", replace(config, window=1 if config.window > 1 else 2))
        try:
            return super().labels(run)
        finally:
            object.__setattr__(self, "config", config)


class OtherLabel(Oracle):
    """The mean for the maximum, and the other way round."""

    def labels(self, run: DenseRun) -> list[Tensor]:
        other = replace(self.config, label="max" if self.config.label == "mean" else "mean")
        return Oracle(other).labels(run)


class OwnLabels(Oracle):
    """Heads that share a kept set do not share their labels."""

    def labels(self, run: DenseRun) -> list[Tensor]:
        return Oracle(replace(self.config, shares="head")).labels(run)


class NewestFirst(Oracle):
    """Of unlabelled tokens the latest leaves first."""

    def enter(self, entering: NewEntries) -> Any:
        known = entering.labels
        assert known is not None
        return {"priority": torch.where(known.isnan(), UNLABELLED - entering.positions[:, None].float(), known)}


def unlabelled_tokens_compete(case: Case) -> bool:
    """Whether several tokens that no label was made for have left the window: few cases do that by chance."""
    return isinstance(case.new_tokens, int) and case.new_tokens >= 6 and case.settings["window"] <= 3


@pytest.mark.parametrize("wrong", [NearFuture, OtherLabel, OwnLabels, NewestFirst], ids=lambda cls: cls.__name__)
def test_a_wrong_oracle_is_found(wrong: type[Oracle]) -> None:
    drawn = oracle_cases().filter(unlabelled_tokens_compete) if wrong is NewestFirst else oracle_cases()
    assert_found(lambda case: check(case, policy_of(case, wrong), exact=ROUNDING), given(case=drawn))


@pytest.mark.parametrize("label", ["mean", "max"])
@pytest.mark.parametrize("shares", ["head", "layer", "model"])
def test_labels_equal_the_loops(label: Any, shares: Any) -> None:
    model, tokens = tiny_model(kv_heads=2, groups=3), random_tokens(30, 5)
    found = Oracle(Oracle.Config(label=label, shares=shares, window=4)).labels(partial(watch_dense_run, model, tokens))
    expected = twin.labels(model, tokens, label, shares, 4)
    for (layer, kv_head), values in expected.items():
        for token, value in enumerate(values):
            wanted = math.log(value) if value > 0 else LEAST_LABEL
            assert found[layer][kv_head, token].item() == pytest.approx(wanted, abs=1e-4)


def test_the_queue_of_unlabelled_tokens_is_exact_and_below_every_label() -> None:
    known = torch.full((1, 1, 2), torch.nan)
    last = 15_000_000
    for position in (0, 1, last - 1):
        entering = NewEntries(0, None, torch.tensor([[position, position + 1]]), known, known, labels=known)  # type: ignore[arg-type]
        first, second = Oracle().enter(entering)["priority"][0, 0].tolist()
        assert second - first == 1
        assert second < LEAST_LABEL
    assert math.log(torch.finfo(torch.float32).tiny) > LEAST_LABEL


def test_rows_together_keep_what_each_keeps_alone() -> None:
    model = tiny_model(kv_heads=2, groups=2)
    texts = [
        Text(row, tuple(random_tokens(24 + 7 * row, row)), tuple(random_tokens(6 + 3 * row, 100 + row)))
        for row in range(5)
    ]
    policy = Oracle(Oracle.Config(window=4))
    alone = evaluate(model, policy, Budget.parse("12"), texts, batch_size=1)
    together = evaluate(model, policy, Budget.parse("12"), texts, batch_size=3, chunk=7)
    for one, other in zip(alone, together, strict=True):
        assert one.metrics["kl"] > 1e-4
        assert [token.kl for token in one.divergence] == pytest.approx(
            [token.kl for token in other.divergence], abs=1e-9
        )


def test_generated_tokens_leave_before_labelled_ones() -> None:
    model = tiny_model()
    prompt = random_tokens(10, 3)
    case = Case(
        rule=twin.Oracle(text=tuple(prompt), model=model, sinks=0, window=2),
        kind="llama",
        model_seed=0,
        layers=2,
        kv_heads=2,
        groups=2,
        tied=False,
        flat=False,
        prompt=tuple(prompt),
        new_tokens=8,
        budget=12,
        prefill="native",
        chunk=16,
        border=None,
    )
    kept = run_case(case, policy_of(case)).kept[18]
    assert all(positions == [*range(10), 17] for positions in kept.values())


def test_dense_passes_are_kept_for_other_comparisons() -> None:
    model = tiny_model()
    text = Text("a", tuple(random_tokens(20, 1)), tuple(random_tokens(5, 2)))
    store: Any = {}
    policy = Oracle(Oracle.Config(window=4))
    (first,) = Comparison(model, policy, Budget.parse("10"), dense_passes=store).run([text])
    assert list(store) == [(text.prompt, text.continuation)]
    (again,) = Comparison(model, policy, Budget.parse("10"), dense_passes=store).run([text])
    assert again.metrics == first.metrics
    store[text.prompt, text.continuation] = torch.zeros_like(store[text.prompt, text.continuation])
    (other,) = Comparison(model, policy, Budget.parse("10"), dense_passes=store).run([text])
    assert other.metrics != first.metrics


def test_free_generation_at_a_budget_beyond_the_text_is_the_full_cache() -> None:
    model = tiny_model()
    requests = [Request(row, tuple(random_tokens(15 + row, row)), 9, 6) for row in range(3)]
    answers = [
        {done.key: done.tokens for done in Generator(model, Numbers(), policy, budget).run(requests)}  # type: ignore[arg-type]
        for policy, budget in ((Oracle(), Budget.parse("64")), (Full(), None))
    ]
    assert answers[0] == answers[1]


def test_labels_of_a_prompt_know_the_dense_run_s_own_answer() -> None:
    model, prompt = tiny_model(), random_tokens(30, 8)
    full = next(Generator(model, Numbers(), Full(), None).run([Request("a", tuple(prompt), 9, 12)]))  # type: ignore[arg-type]
    for ahead in (0, 12):
        policy = Oracle(Oracle.Config(label="max", window=4, ahead=ahead))
        cache, _ = ModelRunner(model, policy, Budget.parse("16")).prefill(prompt, 9)
        text = [*prompt, *full.tokens[:ahead]]
        expected = policy.labels(partial(watch_dense_run, model, text))
        assert cache.rows[0].labels is not None
        for found, wanted in zip(cache.rows[0].labels, expected, strict=True):
            torch.testing.assert_close(found, wanted[:, :30], atol=1e-5, rtol=0)
    assert len(full.tokens) == 12


def test_plain_generate_is_refused_with_a_sentence() -> None:
    model = tiny_model()
    cache = new_cache(model, Oracle(), 48)
    with pytest.raises(UserError, match="needs labels from a dense run"):
        model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("bad", [{"sinks": -1}, {"window": 0}, {"ahead": -1}, {"label": "median"}, {"shares": "row"}])
def test_impossible_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="oracle"):
        Oracle.Config(**bad)
