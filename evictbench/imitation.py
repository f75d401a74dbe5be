"""What trainings beside a frozen model share: its pass up to the output head, and how far two passes' predictions are.

Logits over the whole vocabulary exist for a piece of the tokens at a time, and are never kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Divergence = Literal["forward", "reverse"]
"""With p the teacher's and q the student's, sums of: p (log p - log q), forward; q (log q - log p), reverse."""

HEAD_TOKENS = 128
"""Tokens whose logits exist at a time."""

KEPT_TOKENS = 2048
"""Tokens of a batch up to which activations are kept; of more, each layer is computed again in the backward pass."""


@contextmanager
def recomputed(model: PreTrainedModel, wanted: bool = True) -> Iterator[None]:
    """Inside, the layers of a frozen model keep only their inputs for the backward pass, and compute the rest again.

    The layers alone are told that they train, so that no dropout begins.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [layer for layer in model.modules() if wanted and isinstance(layer, GradientCheckpointingLayer)]
    before = [(layer.gradient_checkpointing, layer.training) for layer in layers]
    for layer in layers:
        layer.gradient_checkpointing = layer.training = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    try:
        yield
    finally:
        for layer, (was, trained) in zip(layers, before, strict=True):
            layer.gradient_checkpointing, layer.training = was, trained


def distance(model: PreTrainedModel, teacher: Tensor, student: Tensor, direction: Divergence) -> Tensor:
    """Mean divergence of next-token distributions, nats a token, from what the output head reads `[rows, tokens,
    hidden]`. A scaling of logits behind the head is left out.

    The gradient reaches `student` alone. It is taken piece by piece at once, so that logits are computed once and
    never kept.
    """
    head: Any = model.get_output_embeddings()
    count = teacher.shape[:2].numel()
    total = student.new_zeros((), dtype=torch.float32)
    pieces = zip(teacher.flatten(0, 1).split(HEAD_TOKENS), student.flatten(0, 1).split(HEAD_TOKENS), strict=True)
    for known, states in pieces:
        leaf = states.detach().requires_grad_(states.requires_grad)
        p, q = _wide(head(known)).log_softmax(-1), _wide(head(leaf)).log_softmax(-1)
        if direction == "reverse":
            p, q = q, p
        value = F.kl_div(q, p, log_target=True, reduction="sum") / count
        total = total + value.detach().to(total.device)
        if leaf.requires_grad and value.requires_grad:
            (slope,) = torch.autograd.grad(value, leaf)
            linear = (states * slope).sum()
            total = total + (linear - linear.detach())  # nothing, with the divergence's slope in the states
    return total


def before_head(model: PreTrainedModel, tokens: Tensor, **options: Any) -> Tensor:
    """What the output head reads of tokens `[rows, tokens]`: `[rows, tokens, hidden]`. options: for the model."""
    backbone: Any = model.base_model
    hidden: Tensor = backbone(input_ids=tokens.to(model.device), use_cache=False, **options).last_hidden_state
    return hidden


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()
