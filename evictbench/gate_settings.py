"""What a gate lets pass, in one table."""

from __future__ import annotations

TOLERANCE = 0.02
"""A drop in score, in [0, 1], that is let pass."""
