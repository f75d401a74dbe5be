"""Distillation: how far a student's next-token distributions are from those of the dense model.

There are two divergences. `StudentModel`, for fine-tuning, compares with the teacher's `TOP` largest logits a token,
renormalised, which then are the teacher's whole distribution; the student's log-probabilities are over the whole
vocabulary. So its divergence is zero only where the student puts nothing outside the teacher's choice; for an unchanged
model with nothing hidden it is minus the log of the teacher's mass inside it, which is small. `divergence`, for a gate
or scorer beside a frozen model, compares whole vocabularies.
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

    from evictbench.cache.attention import DenseAttention

TOP = 256
"""The teacher's logits that count in fine-tuning, per token."""

FINETUNE_CHUNK = 256
"""Tokens whose logits over the whole vocabulary exist at a time in fine-tuning."""

DIVERGENCE_CHUNK = 128
"""Tokens whose logits over the whole vocabulary exist at a time in `divergence`."""

KEPT_TOKENS = 2048
"""Tokens of a batch up to which activations are kept; of more, each layer is computed again in the backward pass."""

Direction = Literal["forward", "reverse"]
"""With p the teacher's and q the student's, sums of: p (log p - log q), forward; q (log q - log p), reverse."""


class TeacherModel(nn.Module):
    """A frozen model that gives its likeliest next tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules  # what accelerate shards by

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Renormalised log-probabilities `[rows, S, TOP]` and their token ids, for tokens `[rows, S]`."""
        head: Any = self.model.get_output_embeddings()
        tops = []
        for hidden in last_hidden_state(self.model, tokens).split(FINETUNE_CHUNK, dim=1):
            logits = at_least_float32(head(hidden))
            tops.append(logits.topk(min(TOP, logits.shape[-1]), dim=-1))
        values = torch.cat([top.values for top in tops], dim=1)
        return values.log_softmax(-1), torch.cat([top.indices for top in tops], dim=1)


class StudentModel(nn.Module):
    """The model that is trained. It returns its divergence from the teacher, so that data-parallel wrappers find loss
    and parameters in one forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules

    def forward(self, tokens: Tensor, log_probs: Tensor, ids: Tensor, attention: DenseAttention) -> Tensor:
        """KL(teacher ‖ student) in nats a token, a scalar; log_probs and ids as `TeacherModel` returns them."""
        head: Any = self.model.get_output_embeddings()

        def chunk_divergence(hidden: Tensor, log_probs: Tensor, ids: Tensor) -> Tensor:
            student = at_least_float32(head(hidden)).log_softmax(-1).gather(-1, ids.to(hidden.device))
            log_probs = log_probs.to(student.device)
            return (log_probs.exp() * (log_probs - student)).sum()

        whole = (last_hidden_state(self.model, tokens, dense_attention=attention), log_probs, ids)
        chunks = zip(*(tensor.split(FINETUNE_CHUNK, dim=1) for tensor in whole), strict=True)
        total = torch.stack([checkpoint(chunk_divergence, *chunk, use_reentrant=False) for chunk in chunks]).sum()
        return total / tokens.numel()


def divergence(model: PreTrainedModel, teacher: Tensor, student: Tensor, direction: Direction) -> Tensor:
    """Mean divergence of next-token distributions in nats a token, a scalar.

    teacher, student: what the output head reads, `[rows, tokens, hidden]`. A scaling of logits behind the head is left
    out. The gradient reaches `student` alone. It is taken chunk by chunk at once, so that logits are computed once and
    never kept.
    """
    head: Any = model.get_output_embeddings()
    count = teacher.shape[:2].numel()
    total = student.new_zeros((), dtype=torch.float32)
    chunks = zip(*(states.flatten(0, 1).split(DIVERGENCE_CHUNK) for states in (teacher, student)), strict=True)
    for teacher_states, student_states in chunks:
        leaf = student_states.detach().requires_grad_(student_states.requires_grad)
        p, q = (at_least_float32(head(states)).log_softmax(-1) for states in (teacher_states, leaf))
        if direction == "reverse":
            p, q = q, p
        value = F.kl_div(q, p, log_target=True, reduction="sum") / count
        total = total + value.detach().to(total.device)
        if leaf.requires_grad and value.requires_grad:
            (gradient,) = torch.autograd.grad(value, leaf)
            linear = (student_states * gradient).sum()
            total = total + (linear - linear.detach())  # adds nothing to the value, and the gradient to the graph
    return total


def last_hidden_state(model: PreTrainedModel, tokens: Tensor, **options: Any) -> Tensor:
    """The input `[rows, S, hidden]` of the output head for tokens `[rows, S]`. options: of the model's forward pass."""
    backbone: Any = model.base_model
    hidden: Tensor = backbone(input_ids=tokens, use_cache=False, **options).last_hidden_state
    return hidden


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise UserError for a model that does more to its logits than its output head does."""
    head: Any = model.get_output_embeddings()
    if head is None:
        raise UserError(f"{type(model).__name__} has no output head to distil.")
    tokens = torch.arange(4, device=model.device)[None]
    expected: Tensor = model(input_ids=tokens, use_cache=False).logits
    logits = head(last_hidden_state(model, tokens)).to(expected.device)
    if not torch.allclose(logits, expected, rtol=1e-2, atol=1e-2):
        raise UserError(
            f"{type(model).__name__} scales its logits behind the output head, which training by its predictions does "
            "not follow."
        )


@contextmanager
def recomputed(model: PreTrainedModel, wanted: bool = True) -> Iterator[None]:
    """Inside, the layers of a frozen model keep only their inputs for the backward pass, and compute the rest again.

    The layers alone are told that they train, so that no dropout begins. wanted: False does nothing.
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
        for layer, (checkpointing, training) in zip(layers, before, strict=True):
            layer.gradient_checkpointing, layer.training = checkpointing, training


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor, with half-precision numbers as float32."""
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()
