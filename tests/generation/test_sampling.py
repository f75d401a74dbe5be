"""Sampling: random numbers by counter, and the filters against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generation import generator, prompt
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from evictbench.generation.generator import Request
from evictbench.generation.sampling import choose, uniform
from evictbench.policies.full import Full
from evictbench.suite import Sampling

pytestmark = pytest.mark.engine


def test_numbers_depend_on_every_argument_and_are_uniform() -> None:
    assert uniform(1, 2, 3, 4) == uniform(1, 2, 3, 4)
    base = uniform(1, 2, 3, 4)
    assert all(uniform(*other) != base for other in [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
    for fixed in ((0, 0, 0), (7, 2**63, 5)):
        numbers = torch.tensor([uniform(*fixed, step) for step in range(4000)], dtype=torch.float64)
        assert numbers.min() >= 0
        assert numbers.max() < 1
        # Kolmogorov-Smirnov distance below the 0.1% critical value.
        distance = (numbers.sort().values - torch.arange(4000) / 4000).abs().max()
        assert distance < 1.95 / 4000**0.5
        assert abs(torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]) < 0.06


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.6, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 20, 500]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_filters_leave_what_those_of_transformers_leave(
    seed: int, temperature: float, top_p: float, **rest: Any
) -> None:
    """Every token that can be drawn, with its probability: the grid of numbers maps onto the distribution."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)) * 3
    sampling = Sampling(temperature=temperature, top_p=top_p, **rest)
    warped = TemperatureLogitsWarper(temperature)(None, logits)
    if sampling.top_k:
        warped = TopKLogitsWarper(sampling.top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    if sampling.min_p:
        warped = MinPLogitsWarper(sampling.min_p)(None, warped)
    expected = warped.softmax(-1)[0].double()
    grid = [(index + 0.5) / 2000 for index in range(2000)]
    tokens = choose(logits.expand(2000, -1), [sampling] * 2000, grid)
    counts = torch.bincount(torch.tensor(tokens), minlength=40).double() / 2000
    torch.testing.assert_close(counts, expected, atol=1.01 / 1000, rtol=0)
    assert set(tokens) <= set(expected.nonzero().flatten().tolist())


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [2.0, 2.0, 2.0]])
    rows = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0)]
    assert choose(logits, rows, [0.99, 0.999, 0.999999999]) == [1, 0, 2]
    assert choose(logits, rows, [0.99, 0.0, 0.0]) == [1, 1, 0]


def test_draws_do_not_depend_on_company_or_order() -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95)
    requests = [
        Request((key, repeat), prompt(20 + key, key), None, 12, sampling=sampling, draw=(1000 + key, repeat))
        for key in range(3)
        for repeat in range(2)
    ]
    alone = {c.key: c.tokens for c in generator(Full(), None, batch_size=1).run(requests)}
    together = {c.key: c.tokens for c in generator(Full(), None, batch_size=4).run(reversed(requests))}
    assert alone == together
    assert len(set(alone.values())) == len(requests)
    other = {c.key: c.tokens for c in generator(Full(), None, batch_size=4, seed=1).run(requests)}
    assert all(other[key] != tokens for key, tokens in alone.items())


class Words:
    """A tokenizer whose words are its tokens."""

    eos_token_id = None
    words = ("a ", "<think>", "</think>", "stop ", "b ", "\n")

    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        return "".join(self.words[int(token)] for token in tokens)


@pytest.mark.parametrize(
    ("opened", "script", "text"),
    [
        (False, [1, 0, 3, 2, 4, 3, 4], "<think>a stop </think>b "),
        (True, [0, 3, 2, 4, 3, 4, 4], "a stop </think>b "),
        (False, [4, 3, 4, 4, 4, 4, 4], "b "),
        (False, [1, 3, 0, 3, 0, 3, 0], None),
        (False, [1, 2, 3, 4, 4, 4, 4], "<think></think>"),
        (False, [1, 0, 2, 5, 4, 5, 0], "<think>a </think>\nb "),
    ],
)
def test_b8_no_stop_string_inside_a_thought(
    opened: bool, script: list[int], text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = generator(Full(), None)
    ours.tokenizer = Words()  # type: ignore[assignment]
    monkeypatch.setattr(ours, "_choose", lambda logits, rows: [script[len(row.tokens)] for row in rows])
    request = Request(0, (0, 0, 1 if opened else 0), None, 7, ("stop", "\n"), thinking=True)
    done = next(ours.run([request]))
    assert done.text == (text if text is not None else Words().decode(script))
    assert done.truncated == (text is None)
