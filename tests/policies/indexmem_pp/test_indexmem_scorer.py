"""IndexMem++'s scorer: its numbers written out, what it begins with, and which saved ones are refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from evictbench.errors import UserError
from evictbench.policies.indexmem_pp.scorer import Scorer, effective, scorers
from evictbench.policy import ModelShape

HIDDEN, WIDTH, KV_HEADS = 12, 6, 2
SHAPE = ModelShape(layers=3, heads=4, kv_heads=KV_HEADS, head_dim=8, hidden_size=HIDDEN)


def made(seed: int = 0) -> Scorer:
    """A scorer whose every parameter matters."""
    torch.manual_seed(seed)
    scorer = Scorer(HIDDEN, WIDTH, KV_HEADS)
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return scorer


def stacked(count: int = 3) -> dict[str, Tensor]:
    states = [made(seed).state_dict() for seed in range(count)]
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def test_score_and_rate_written_out() -> None:
    scorer = made().double()
    hidden = torch.randn(1, 4, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = [0, 3, 700, 16_384]
    score, rate = scorer(hidden, torch.tensor([positions]))
    weights = {name: parameter.tolist() for name, parameter in scorer.named_parameters()}

    def norm(x: list[float], name: str) -> list[float]:
        mean = sum(x) / len(x)
        spread = math.sqrt(sum((each - mean) ** 2 for each in x) / len(x) + 1e-5)
        pairs = zip(x, weights[f"{name}.weight"], weights[f"{name}.bias"], strict=True)
        return [(each - mean) / spread * gain + bias for each, gain, bias in pairs]

    def times(matrix: list[list[float]], x: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, x, strict=True)) for row in matrix]

    for at, position in enumerate(positions):
        inner = times(weights["narrow.weight"], norm(hidden[0, at].tolist(), "input_norm"))
        inner = [each * (1 + math.erf(each / math.sqrt(2))) / 2 for each in norm(inner, "width_norm")]
        for head in range(KV_HEADS):
            expected = times(weights["to_score.weight"], inner)[head] + 1e-6 * position
            assert score[0, head, at].item() == pytest.approx(expected, abs=1e-12)
            raw = times(weights["to_rate.weight"], inner)[head] + weights["to_rate.bias"][head]
            assert rate[0, head, at].item() == pytest.approx(-math.log1p(math.exp(raw)), abs=1e-12)
    assert torch.equal(scorer(hidden)[0], scorer(hidden, torch.arange(4)[None])[0])


def test_a_fresh_scorer_fades_at_one_rate_and_scales_by_one() -> None:
    """Every key loses 1 over 16,384 positions, whatever it is."""
    torch.manual_seed(0)
    scorer = Scorer(HIDDEN, WIDTH, KV_HEADS)
    score, rate = scorer(torch.randn(2, 5, HIDDEN))
    assert score.shape == rate.shape == (2, KV_HEADS, 5)
    torch.testing.assert_close(rate, torch.full_like(rate, -1.0))
    assert score.std() > 0.05
    assert scorer.gate_scale.tolist() == [1.0]
    assert effective(torch.tensor(2.0), torch.tensor(-1.0), torch.tensor(16_384)).item() == 1.0
    assert effective(torch.tensor(2.0), torch.tensor(-0.5), torch.tensor(8_192)).item() == 1.75


def test_a_prompt_in_pieces_scores_as_in_one() -> None:
    scorer, hidden = made(), torch.randn(1, 9, HIDDEN)
    whole = scorer(hidden)
    first = scorer(hidden[:, :4])
    second = scorer(hidden[:, 4:], torch.arange(4, 9)[None])
    for at in (0, 1):
        torch.testing.assert_close(torch.cat([first[at], second[at]], dim=-1), whole[at], rtol=1e-5, atol=1e-6)


def test_float32_inside_whatever_the_model() -> None:
    scorer, hidden = made(), torch.randn(1, 5, HIDDEN).to(torch.bfloat16)
    score, rate = scorer(hidden)
    assert score.dtype == rate.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(scorer(hidden)[0], score)
    assert torch.equal(scorer(hidden.float())[0], score)


def test_saved_scorers_are_taken_apart_by_layer() -> None:
    saved = stacked()
    hidden = torch.randn(1, 5, HIDDEN)
    found = scorers({name: tensor.half() for name, tensor in saved.items()}, SHAPE, "here")
    assert len(found) == 3
    for seed, scorer in enumerate(found):
        assert not any(parameter.requires_grad for parameter in scorer.parameters())
        assert {parameter.dtype for parameter in scorer.parameters()} == {torch.float32}
        torch.testing.assert_close(scorer(hidden)[0], made(seed)(hidden)[0], rtol=0, atol=2e-2)
    exact = scorers(saved, SHAPE)
    assert torch.equal(exact[2](hidden)[1], made(2)(hidden)[1])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"narrow.weight": None}, r"The weights here hold no scorer of IndexMem\+\+: narrow\.weight"),
        ({"to_rate.bias": None}, r"to_rate\.bias is missing, and \(3, 2\) is expected"),
        (
            {"to_score.weight": torch.zeros(3, 4, WIDTH)},
            r"to_score\.weight is \(3, 4, 6\), and \(3, 2, 6\) is",
        ),
        ({"gate_scale": torch.zeros(2, 1)}, r"gate_scale is \(2, 1\), and \(3, 1\) is expected"),
        ({"gamma": torch.zeros(3)}, r"gamma is \(3,\), and nothing is expected"),
        ({"narrow.weight": torch.zeros(3, WIDTH, 10)}, "read hidden states of width 10, and this model's have 12"),
    ],
)
def test_others_are_refused(changed: dict[str, Tensor | None], sentence: str) -> None:
    tensors = {name: tensor for name, tensor in (stacked() | changed).items() if tensor is not None}
    with pytest.raises(UserError, match=sentence):
        scorers(tensors, SHAPE, "here")
