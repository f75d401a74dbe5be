"""The tolerances and error rates of gates."""

from __future__ import annotations

TOLERANCE = 0.02
"""A drop in score, in [0, 1], that is let pass (`--tolerance`)."""

LATENCY_TOLERANCE = 0.10
"""A rise of a decode step's time over the full cache's, as a share of what it was, that is let pass
(`--latency-tolerance`)."""

OCCUPANCY_TOLERANCE = 0.001
"""A rise in mean occupancy, as a share of the baseline's, that is let pass: a quarter of an entry in 256."""

BYTES_TOLERANCE = 0.01
"""A rise in the decode cache's bytes, as a share, that is let pass. In a batch they depend a little on other rows."""

SCORE_LEVEL = 0.03
"""Probability that a whole gate fails over scores although none has dropped beyond the tolerance."""

COST_LEVEL = 0.005
"""Probability of a false failure over occupancy and bytes. With that of scores it is below the gate's 5%."""

ABOVE_LEVEL = 0.05
"""Probability that a gate warns of cells above the full cache although none is."""

POWER = 0.8
"""Probability of finding a drop that the gate is said to find."""

EXACT_KL = 1e-3
"""Nats by which the KL of a text, or of any stretch of it, may differ where a result is not meant to change."""

EXACT_IDS = 0.98
"""The share of samples whose greedy token ids are then equal."""

EXACT_OCCUPANCY = 1e-6
"""The share by which mean occupancy may then differ: rounding."""
