"""How much of a large intermediate result exists at a time."""

from __future__ import annotations

TILE_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""Probabilities of a tile, by device type: a tile stays in a core's cache on a CPU, and fills a GPU."""

ELEMENTS_AT_ONCE = 2**24
"""Elements of the largest temporary tensor of any other computation that can be cut into parts."""
