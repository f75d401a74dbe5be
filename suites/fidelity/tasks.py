"""The tasks of fidelity, and the size of what they measure. Data only."""

from __future__ import annotations

TASKS = ("gsm8k", "longbench", "ruler", "text")

DEFAULT_CONTEXT, DEFAULT_LIMIT = 2048, 20
"""Tokens of a text, and texts of a task, where a request states none."""

LEAST_CONTEXT = 64

CARD_TOKENS = 256
"""Tokens of a continuation where --max-new-tokens gives no number; the task files state the same."""
