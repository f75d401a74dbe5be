"""Brute-force twins: KV-cache eviction written from the definitions, slow and dense, in float64.

Nothing here imports evictbench. The model keeps every key and value for ever; a policy is no more than an
explicit list of the key positions that each query of each head may see.
"""

from twin.model import DenseModel, Forward, dense_forward
from twin.rules import H2O, TOVA, Cut, Full, Random, Rule, SnapKV, StreamingLLM, choose
from twin.simulate import Budget, Trace, simulate
from twin.tiny import random_tokens, tiny_model

__all__ = [
    "H2O",
    "TOVA",
    "Budget",
    "Cut",
    "DenseModel",
    "Forward",
    "Full",
    "Random",
    "Rule",
    "SnapKV",
    "StreamingLLM",
    "Trace",
    "choose",
    "dense_forward",
    "random_tokens",
    "simulate",
    "tiny_model",
]
