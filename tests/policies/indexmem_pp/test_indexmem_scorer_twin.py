"""The scorer against its definition."""

from __future__ import annotations

import pytest
import torch

from evictbench.policies.indexmem_pp.scorer import Scorer
from evictbench.policies.indexmem_pp.together import score_layers
from twin.indexmem_pp import score_and_rate

HIDDEN, WIDTH, KV_HEADS = 24, 12, 3


def random_scorer(seed: int) -> Scorer:
    scorer = Scorer(HIDDEN, WIDTH, KV_HEADS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in scorer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return scorer.requires_grad_(False)


@pytest.mark.engine
@pytest.mark.parametrize("seed", range(3))
def test_scorer_equals_its_twin(seed: int) -> None:
    scorer = random_scorer(seed)
    hidden = torch.randn((2, 5, HIDDEN), generator=torch.Generator().manual_seed(seed)) * 3
    positions = torch.tensor([[0, 1, 2, 3, 4], [70_000, 70_001, 70_002, 70_003, 70_004]])
    score, rate = scorer(hidden, positions)
    assert score.dtype == rate.dtype == torch.float32
    weights = {name: tensor.double() for name, tensor in scorer.state_dict().items()}
    for row in range(2):
        for token in range(5):
            for head in range(KV_HEADS):
                at = int(positions[row, token])
                want = score_and_rate(weights, hidden[row, token].double(), at, head)
                assert (float(score[row, head, token]), float(rate[row, head, token])) == pytest.approx(want, abs=1e-4)
                assert rate[row, head, token] <= 0


def test_layers_together_are_each_alone() -> None:
    made = [random_scorer(seed) for seed in range(4)]
    stacked = {name: torch.stack([dict(s.named_parameters())[name] for s in made]) for name in made[0].state_dict()}
    hidden = torch.randn((4, 3, 1, HIDDEN), generator=torch.Generator().manual_seed(9)) * 2
    positions = torch.tensor([[5], [80_000], [0]])
    together = score_layers(stacked, hidden, positions)
    for layer, scorer in enumerate(made):
        for found, wanted in zip(together, scorer(hidden[layer], positions), strict=True):
            torch.testing.assert_close(found[layer], wanted, atol=1e-5, rtol=1e-5)
