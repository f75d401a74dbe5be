"""The full cache: nothing is evicted. The yardstick of every other row."""

from evictbench.policy import Policy


class Full(Policy):
    """Keeps every entry; takes no budget."""

    name = "full"
    summary = "nothing is evicted; the yardstick"
    paper = "-"
    needs_budget = False
    shares = "model"
