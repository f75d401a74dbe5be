"""The contract between the engine and an eviction method."""

from evictbench.policy.base import NoSettings, Phase, Policy, PrefillMode, Shares, Signal
from evictbench.policy.step import (
    GROUP_DIM,
    Arriving,
    DenseRun,
    Division,
    Entering,
    GroupReduction,
    MemoryTensor,
    ModelShape,
    Rivals,
    Signals,
    SlotTensor,
    Step,
    Tap,
    Watch,
    reduce_group,
)

__all__ = [
    "GROUP_DIM",
    "Arriving",
    "DenseRun",
    "Division",
    "Entering",
    "GroupReduction",
    "MemoryTensor",
    "ModelShape",
    "NoSettings",
    "Phase",
    "Policy",
    "PrefillMode",
    "Rivals",
    "Shares",
    "Signal",
    "Signals",
    "SlotTensor",
    "Step",
    "Tap",
    "Watch",
    "reduce_group",
]
