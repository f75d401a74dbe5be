"""Logit distillation: a sparse student's next-token distributions against a dense teacher's likeliest tokens.

Of the teacher only its `TOP` largest logits a token are used, and renormalised: they become the whole of its
distribution. The student's log-probabilities are over its whole vocabulary. So the divergence is zero only where the
student puts nothing outside the teacher's choice; for an unchanged model with nothing hidden it is minus the log of
the teacher's mass inside it, which is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evictbench.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.train.sparse_attention import DenseAttention


TOP = 256
"""The teacher's logits that count, per token."""

HEAD_TOKENS = 256
"""Tokens whose logits over the whole vocabulary exist at a time."""


class Teacher(nn.Module):
    """A frozen model, of which the likeliest next tokens are read."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules  # what accelerate shards by

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Renormalised log-probabilities `[rows, S, TOP]` and their token ids, of tokens `[rows, S]`."""
        head: Any = self.model.get_output_embeddings()
        found = []
        for hidden in _hidden(self.model, tokens, None).split(HEAD_TOKENS, dim=1):
            logits = _wide(head(hidden))
            found.append(logits.topk(min(TOP, logits.shape[-1]), dim=-1))
        values = torch.cat([top.values for top in found], dim=1)
        return values.log_softmax(-1), torch.cat([top.indices for top in found], dim=1)


class Pupil(nn.Module):
    """The model that is trained, giving its divergence from the teacher: a module of its own, so that data-parallel
    wrappers find loss and parameters in one forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules

    def forward(self, tokens: Tensor, log_probs: Tensor, ids: Tensor, attention: DenseAttention) -> Tensor:
        """KL(teacher ‖ student) in nats a token, a scalar; log_probs and ids as the teacher gives them."""
        head: Any = self.model.get_output_embeddings()

        def piece(hidden: Tensor, log_probs: Tensor, ids: Tensor) -> Tensor:
            own = _wide(head(hidden)).log_softmax(-1).gather(-1, ids.to(hidden.device))
            log_probs = log_probs.to(own.device)
            return (log_probs.exp() * (log_probs - own)).sum()

        parts = (_hidden(self.model, tokens, attention), log_probs, ids)
        tiles = zip(*(part.split(HEAD_TOKENS, dim=1) for part in parts), strict=True)
        total = torch.stack([checkpoint(piece, *tile, use_reentrant=False) for tile in tiles]).sum()
        return total / tokens.numel()


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise UserError for a model that does more to its logits than its output head does."""
    head: Any = model.get_output_embeddings()
    if head is None:
        raise UserError(f"{type(model).__name__} has no output head to distil.")
    tokens = torch.arange(4, device=model.device)[None]
    expected: Tensor = model(input_ids=tokens, use_cache=False).logits
    found = head(_hidden(model, tokens, None)).to(expected.device)
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2):
        raise UserError(
            f"{type(model).__name__} scales its logits behind the output head, which training by its predictions does "
            "not follow."
        )


def _hidden(model: PreTrainedModel, tokens: Tensor, attention: DenseAttention | None) -> Tensor:
    """What the output head reads, `[rows, S, hidden]`."""
    backbone: Any = model.base_model
    hidden: Tensor = backbone(input_ids=tokens, use_cache=False, dense_attention=attention).last_hidden_state
    return hidden


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


Divergence = Literal["forward", "reverse"]
"""With p the teacher's and q the student's, sums of: p (log p - log q), forward; q (log q - log p), reverse."""

DIVERGENCE_TOKENS = 128
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
    pieces = zip(
        teacher.flatten(0, 1).split(DIVERGENCE_TOKENS), student.flatten(0, 1).split(DIVERGENCE_TOKENS), strict=True
    )
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
