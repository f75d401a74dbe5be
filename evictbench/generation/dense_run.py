"""A dense run over a text that only looks: a policy that `needs_labels` makes them from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.attention import use
from evictbench.policy.base import Policy
from evictbench.policy.step import Watch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Everything(Policy):
    """The full cache."""

    name = "everything"
    summary = "nothing is evicted"
    paper = "-"
    needs_budget = False
    granularity = "model"


def watch_dense_run(model: PreTrainedModel, tokens: Sequence[int], watch: Watch) -> None:
    """Read a text whole, with plain causal attention and nothing evicted, and show every layer that evicts to `watch`.

    Memory is linear in the text where torch's attention kernel is. The model attends through evictbench afterwards.
    """
    use(model)

    def look(
        layer: int, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor | None:
        watch(layer, query, key, value, scaling)
        return None

    with torch.no_grad():
        model(
            input_ids=torch.tensor([list(tokens)], device=model.device),
            use_cache=False,
            logits_to_keep=1,
            dense_attention=look,
        )
