"""Policies as others implement them, to measure on real text what the differences are worth.

    V=studies/authors/variants.py
    python -m studies.compare fidelity --data-dir DATA --prefill dense --limit 8 --budgets 128 \\
        --test tova_newest,h2o_recent --policies tova,$V:TOVAKeepingNewest,h2o,$V:H2OWithOneRecentMore
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evictbench.policies.h2o import H2O
from evictbench.policies.tova import TOVA

if TYPE_CHECKING:
    from torch import Tensor


class TOVAKeepingNewest(TOVA):  # type: ignore[misc]
    """TOVA as kvpress has it: the newest entry stays."""

    name = "tova_newest"
    summary = "TOVA as kvpress has it: the newest entry stays"

    def recent(self, budget: Tensor | int) -> Tensor | int:
        """The newest entry, and the next query's own."""
        return 2


class H2OWithOneRecentMore(H2O):  # type: ignore[misc]
    """H2O with halves that do not count the next query's own entry, as in the authors' `real_drop` code."""

    name = "h2o_recent"
    summary = "H2O with one recent entry more"

    def recent(self, budget: Tensor | int) -> Tensor | int:
        """Half of the budget, and the next query's own."""
        return budget // 2 + 1
