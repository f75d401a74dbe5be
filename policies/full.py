"""The full cache: nothing is evicted. Every other policy is measured against it."""

from evictbench.policy import Policy
from evictbench.policy.plot_style import PlotStyle


class Full(Policy):
    """Keeps every entry; takes no budget."""

    name = "full"
    summary = "nothing is evicted; the yardstick"
    paper = "-"
    plot_style = PlotStyle("#000000", "d", hollow=True, yardstick=True, place=0)
    needs_budget = False
    granularity = "model"
