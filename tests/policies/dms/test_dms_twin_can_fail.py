"""Near misses of DMS that the twin must catch: each is a plausible reading of the method, and wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_dms_twin import Told, random_marks
from twin_comparison import forward_in_parts

import evictbench.policies.dms as dms
from evictbench.cache.new_cache import new_cache
from evictbench.policy import NEVER
from twin.dms import sees
from twin.model import dense_forward
from twin.tiny import random_tokens, tiny_model

ExpiryOfMarks = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]
right: ExpiryOfMarks = dms.expiry_of_marks


def not_shifted(marks: torch.Tensor, positions: torch.Tensor, sinks: int, window: int) -> torch.Tensor:
    own = torch.where(marks & (positions >= sinks)[:, None], (positions + window + 1)[:, None], NEVER).to(torch.int32)
    return torch.cat((torch.full_like(own[:, :, :1], NEVER), own), dim=-1)


def forgotten_at_the_edge(marks: torch.Tensor, positions: torch.Tensor, sinks: int, window: int) -> torch.Tensor:
    found = right(marks, positions, sinks, window)
    found[:, :, 0] = NEVER
    return found


def one_later(marks: torch.Tensor, positions: torch.Tensor, sinks: int, window: int) -> torch.Tensor:
    return right(marks, positions, sinks, window + 1)


def one_earlier(marks: torch.Tensor, positions: torch.Tensor, sinks: int, window: int) -> torch.Tensor:
    return right(marks, positions, sinks, window - 1)


def one_sink_more(marks: torch.Tensor, positions: torch.Tensor, sinks: int, window: int) -> torch.Tensor:
    return right(marks, positions, sinks + 1, window)


def heads_swapped(marks: torch.Tensor, positions: torch.Tensor, sinks: int, window: int) -> torch.Tensor:
    return right(marks.flip(1), positions, sinks, window)


def differs(parts: list[int]) -> bool:
    model: Any = tiny_model("llama")
    tokens, window, sinks = random_tokens(40), 4, 1
    marks = random_marks(2, 2, 41, 0.7, 3)
    marks[..., :3] = True

    def mark(layer: int, head: int, position: int) -> bool:
        return bool(marks[layer, head, position])

    ours = forward_in_parts(model, new_cache(model, Told(marks, window, sinks), "50%", prompt_length=20), tokens, parts)
    twin = dense_forward(model, tokens, lambda layer, head, q: sees(mark, layer, head, q, window, sinks)).logits
    return not torch.allclose(ours, twin, atol=1e-9, rtol=0)


@pytest.mark.parametrize("parts", [[], [40], [9, 22]])
@pytest.mark.parametrize(
    "wrong", [not_shifted, forgotten_at_the_edge, one_later, one_earlier, one_sink_more, heads_swapped]
)
def test_the_twin_catches(wrong: ExpiryOfMarks, parts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not differs(parts)
    monkeypatch.setattr(dms, "expiry_of_marks", wrong)
    # With all tokens in one pass there is no edge at which to forget.
    assert differs(parts) == (wrong is not forgotten_at_the_edge or parts != [40])
