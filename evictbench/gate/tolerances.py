"""What a gate lets pass, in one table."""

from __future__ import annotations

TOLERANCE = 0.02
"""A drop in score, in [0, 1], that is let pass (`--tolerance`)."""

LATENCY_TOLERANCE = 0.10
"""A rise of a decode step's time over the full cache's, as a share of what it was, that is let pass
(`--latency-tolerance`)."""

OCCUPANCY_TOLERANCE = 0.001
"""A rise in mean occupancy, as a share of the baseline's, that is let pass: a quarter of an entry in 256."""

BYTES_TOLERANCE = 0.01
"""Likewise of the decode cache's bytes, which in a batch depend a little on the other rows."""

SCORE_LEVEL = 0.03
"""How often a whole gate may fail over scores of which none has dropped beyond the tolerance."""

COST_LEVEL = 0.005
"""Likewise over occupancy and bytes. Together the two are under the gate's 5% of false alarms."""

ABOVE_LEVEL = 0.05
"""How often it may warn of arms above the full cache of which none is."""

POWER = 0.8
"""How often a drop must be found that the gate is said to find."""

EXACT_KL = 1e-3
"""Nats by which the KL of a text, or of any stretch of it, may differ where a result is not meant to change."""

EXACT_IDS = 0.98
"""The share of samples whose greedy token ids are then equal."""

EXACT_OCCUPANCY = 1e-6
"""The share by which mean occupancy may then differ: rounding."""
