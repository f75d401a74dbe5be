"""Logits that are not finite end the work with the sample's key; masked words of minus infinity do not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from evictbench.errors import NotFinite
from evictbench.generation.fidelity import Comparison, Text
from evictbench.generation.generator import Generator, Request
from evictbench.generation.loglikelihood import Choice, ChoiceScorer
from evictbench.generation.sampling import NO_TOKEN, choose
from evictbench.policies.full import Full
from evictbench.suite.spec import GREEDY, Sampling
from twin import tiny_model

pytestmark = pytest.mark.engine

PROMPT = tuple(range(12))
SAMPLED = Sampling(temperature=0.8, top_p=0.9, top_k=5)


class Words:
    """A tokenizer that spells nothing."""

    eos_token_id = None

    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        return ""


@contextmanager
def damaged(model: Any, at_pass: int, value: float) -> Iterator[None]:
    """One logit of the last row has this value from some forward pass on."""
    passes = 0

    def damage(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes > at_pass:
            output[-1, -1, 5] = value
        return output

    handle = model.lm_head.register_forward_hook(damage)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize(("value", "fails"), [(math.nan, True), (math.inf, True), (-math.inf, False), (None, False)])
def test_only_finite_logits_give_a_token(sampling: Sampling, value: float | None, fails: bool) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    whole = choose(logits, [sampling] * 3, [0.3, 0.5, 0.7])
    if value is not None:
        logits[1, next(word for word in range(50) if word != whole[1])] = value
    tokens = choose(logits, [sampling] * 3, [0.3, 0.5, 0.7])
    assert (tokens[0], tokens[2]) == (whole[0], whole[2])
    assert (tokens[1] == NO_TOKEN) == fails
    logits[1] = math.nan
    assert choose(logits, [sampling] * 3, [0.3, 0.5, 0.7])[1] == NO_TOKEN


def generate(model: Any, key: object) -> list[Any]:
    engine = Generator(model, Words(), Full(), None, chunk=16)  # type: ignore[arg-type]
    return list(engine.run([Request(key, PROMPT, None, 8)]))


def score(model: Any, key: object) -> list[Any]:
    return list(ChoiceScorer(model, Full(), None, chunk=16).run([Choice(key, PROMPT, (5, 6, 7, 8, 9))]))


def compare(model: Any, key: object) -> list[Any]:
    return list(Comparison(model, Full(), None, chunk=16).run([Text(key, PROMPT, (5, 6, 7, 8, 9))]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("work", "at_pass", "tokens"),
    [(generate, 0, 0), (generate, 3, 3), (score, 0, 0), (score, 3, 3), (compare, 1, 0), (compare, 3, 2)],
)
def test_the_sample_is_named(work: Any, at_pass: int, tokens: int, value: float) -> None:
    model = tiny_model()
    with damaged(model, at_pass, value), pytest.raises(NotFinite, match="logits that are not finite") as failed:
        work(model, ("task", 3, 0))
    assert failed.value.key == ("task", 3, 0)
    assert failed.value.tokens == tokens


def test_rows_that_had_finished_are_there() -> None:
    model = tiny_model()
    engine = Generator(model, Words(), Full(), None, chunk=16, batch_size=2)  # type: ignore[arg-type]
    completions = engine.run([Request("short", PROMPT, None, 2), Request("long", PROMPT, None, 9)])
    with damaged(model, 4, math.nan):
        assert next(completions).key == "short"
        with pytest.raises(NotFinite) as failed:
            next(completions)
    assert failed.value.key == "long"
