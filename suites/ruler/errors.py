"""The suite's own error."""

from __future__ import annotations

from evictbench.errors import UserError


class Unavailable(UserError):
    """One task cannot run here (too little context, no data). The default set leaves it out and says so;
    a task that was asked for by name is refused with the same sentence."""
