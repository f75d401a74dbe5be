"""A dense run over a text that only looks: what a policy that foresees learns its labels from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.attention import use
from evictbench.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.feeding import Feeder

Watch = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""Hears of every layer: its number, query `[1, heads, tokens, head_dim]` and key `[1, kv_heads, tokens, head_dim]`,
both rotated, the value, and the scaling of query times key."""

DenseRun = Callable[[Watch], None]
"""A dense run over one text: shows every layer, the first one first."""


class Everything(Policy):
    """The full cache."""

    name = "everything"
    summary = "nothing is evicted"
    paper = "-"
    needs_budget = False
    shares = "model"


def write_on(model: PreTrainedModel, prompt: Sequence[int], most: int, feeder: Feeder | None = None) -> list[int]:
    """How the model answers a prompt, greedily and with nothing evicted: at most `most` tokens, its end left out.

    feeder: one for the full cache, if there is one.
    """
    if most < 1:
        return []
    if feeder is None:
        from evictbench.feeding import Feeder

        feeder = Feeder(model, Everything(), None)
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    written: list[int] = []
    with torch.no_grad():
        cache, logits = feeder.read(prompt)
        while (token := int(logits.argmax())) not in ends:
            written.append(token)
            if len(written) == most:
                break
            logits = feeder.feed(cache, [[token]], [len(prompt) + len(written) - 1])[0, -1]
    return written


def watch_dense_run(model: PreTrainedModel, tokens: Sequence[int], watch: Watch) -> None:
    """Read a text whole, with plain causal attention and nothing evicted, and show every layer to `watch`.

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
