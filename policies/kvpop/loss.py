"""KVpop's loss: at every query, the newcomer against the worst entry that the teacher keeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .ranking import boundaries, pool_at_end

TIE = 0.5
"""Teacher priorities this close (in nats) count half."""


def ranking_loss(
    teacher_priority: Tensor, student_priority: Tensor, *, sinks: int, window: int, pool: int, temperature: float = 1.0
) -> Tensor:
    """`mean(omega · softplus(-y · delta / temperature))` over heads and queries, a scalar.

    Both priorities `[.., S]`, static, age included. At query q, where E(q) does not fit the pool, y is +1 if the
    teacher keeps `t_new = q - window` and -1 if not, and delta is the student's priority of t_new less that of the
    teacher's boundary; there is no term where t_new is the boundary. 0 where there is no term at all.

    omega is ours, the paper gives no formula: `|D| / (|D| + TIE)`, D the same difference in the teacher's priorities,
    over the share that the term's label has among its head's terms, and 1 on average in each head.
    """
    cut = boundaries(teacher_priority, sinks=sinks, window=window, pool=pool)
    length = teacher_priority.shape[-1]
    query = torch.arange(length, device=teacher_priority.device)
    newcomer = (query - window).clamp(min=0).expand(cut.boundary.shape)
    counts = (cut.boundary >= 0) & (cut.boundary != newcomer)
    boundary = cut.boundary.clamp(min=0)
    with torch.no_grad():
        teacher = teacher_priority.detach()
        gap = (teacher.gather(-1, newcomer) - teacher.gather(-1, boundary)).abs()
        tie = torch.where(counts, gap / (gap + TIE), 0.0)
        kept, dropped = counts & cut.keeps_new, counts & ~cut.keeps_new
        terms = counts.sum(-1, keepdim=True)
        alike = torch.where(cut.keeps_new, kept.sum(-1, keepdim=True), dropped.sum(-1, keepdim=True))
        omega = tie * terms / alike.clamp(min=1)
        omega = omega * terms / omega.sum(-1, keepdim=True).clamp(min=torch.finfo(omega.dtype).tiny)
    delta = student_priority.gather(-1, newcomer) - student_priority.gather(-1, boundary)
    sign = torch.where(cut.keeps_new, 1.0, -1.0)
    loss = torch.where(counts, omega * F.softplus(-sign * delta / temperature), 0.0)
    return loss.sum() / counts.sum().clamp(min=1)


def recall(teacher_priority: Tensor, student_priority: Tensor, *, sinks: int, window: int, pool: int) -> float:
    """The share of the teacher's pool that the student's holds too, at the last query, over all heads."""
    teacher = pool_at_end(teacher_priority, sinks=sinks, window=window, pool=pool)
    student = pool_at_end(student_priority, sinks=sinks, window=window, pool=pool)
    return float((teacher & student).sum() / teacher.sum().clamp(min=1))
