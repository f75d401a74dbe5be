"""KVpop's loss: at every query, the new entry against the worst one that the teacher keeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .ranking import boundaries, pool_at_end

TIE = 0.5
"""A difference of the teacher's priorities, in nats, at which a term counts half."""


def ranking_loss(
    teacher_priority: Tensor, student_priority: Tensor, *, sinks: int, window: int, pool: int, temperature: float = 1.0
) -> Tensor:
    """`mean(omega · softplus(-y · delta / temperature))` over heads and queries, a scalar; 0 where there is no term.

    Both priorities are static, age included, `[.., S]`. There is a term at every query q at which E(q) does not fit the
    pool and t_new is not the boundary: y is +1 if the teacher keeps `t_new = q - window` and -1 if not, and delta is
    the student's priority of t_new less that of the teacher's boundary (see `ranking`).

    omega is ours, as the paper gives no formula: `|D| / (|D| + TIE)`, where D is delta of the teacher's priorities,
    divided by the share of terms with this y among its head's terms, and scaled to a mean of 1 in each head.
    """
    cut = boundaries(teacher_priority, sinks=sinks, window=window, pool=pool)
    length = teacher_priority.shape[-1]
    query = torch.arange(length, device=teacher_priority.device)
    new = (query - window).clamp(min=0).expand(cut.boundary.shape)
    has_term = (cut.boundary >= 0) & (cut.boundary != new)
    boundary = cut.boundary.clamp(min=0)
    with torch.no_grad():
        teacher = teacher_priority.detach()
        gap = (teacher.gather(-1, new) - teacher.gather(-1, boundary)).abs()
        tie = torch.where(has_term, gap / (gap + TIE), 0.0)
        kept, dropped = has_term & cut.keeps_new, has_term & ~cut.keeps_new
        terms = has_term.sum(-1, keepdim=True)
        same_label = torch.where(cut.keeps_new, kept.sum(-1, keepdim=True), dropped.sum(-1, keepdim=True))
        omega = tie * terms / same_label.clamp(min=1)
        omega = omega * terms / omega.sum(-1, keepdim=True).clamp(min=torch.finfo(omega.dtype).tiny)
    delta = student_priority.gather(-1, new) - student_priority.gather(-1, boundary)
    sign = torch.where(cut.keeps_new, 1.0, -1.0)
    loss = torch.where(has_term, omega * F.softplus(-sign * delta / temperature), 0.0)
    return loss.sum() / has_term.sum().clamp(min=1)


def recall(teacher_priority: Tensor, student_priority: Tensor, *, sinks: int, window: int, pool: int) -> float:
    """The share of the teacher's pool that is also in the student's, at the last query, over all heads."""
    teacher = pool_at_end(teacher_priority, sinks=sinks, window=window, pool=pool)
    student = pool_at_end(student_priority, sinks=sinks, window=window, pool=pool)
    return float((teacher & student).sum() / teacher.sum().clamp(min=1))
