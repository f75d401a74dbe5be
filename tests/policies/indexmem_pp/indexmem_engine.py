"""IndexMem++ as the engine runs it, with scores that it is told, and the comparison with its twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from indexmem_cases import Case, told
from torch import Tensor
from twin_comparison import forward, kept

from evictbench.cache.paged.head_budget import HeadBudgetCache
from evictbench.policies.indexmem_pp import IndexMem, Settings
from evictbench.policies.indexmem_pp.centroids import starts
from evictbench.policy import NewEntries
from twin.indexmem_pp_run import Run, Starts, Told


class ToldScores(IndexMem):  # type: ignore[misc, unused-ignore]
    """IndexMem++ whose scores and rates are tables `[layers, kv_heads, tokens]`, by position."""

    hooks: frozenset[Any] = frozenset()  # type: ignore[assignment, unused-ignore]

    def __init__(self, config: Any, scores: Tensor, rates: Tensor) -> None:
        super().__init__(config)
        self.table = torch.stack((scores, rates), dim=-1)

    def features(self, entries: NewEntries) -> Mapping[str, Tensor]:
        at = entries.positions.long().clamp(min=0)
        return {"score": self.table[entries.layer][:, at].transpose(0, 1)}


def policy_of(case: Case, cls: type[ToldScores] = ToldScores) -> ToldScores:
    rules = case.rules
    config = Settings(
        sinks=rules.sinks,
        window=rules.window,
        centroids=rules.centroids,
        budgets=rules.budgets,
        floor=rules.floor,
        prompt=rules.prompt,
        deadlines=rules.deadlines,
    )
    return cls(config, *case.scores_and_rates())


def budget_of(case: Case) -> int | str:
    budget = case.rules.budget
    return budget if isinstance(budget, int) else f"{budget * 100:g}%"


def cache_of(case: Case, policy: IndexMem | None = None, **settings: Any) -> HeadBudgetCache:
    return HeadBudgetCache(
        case.model(),
        policy or policy_of(case),
        budget_of(case),
        prefill=case.rules.prefill,
        **{"prompt_length": case.context, **settings},
    )


def counts(cache: HeadBudgetCache, layer: int, head: int, row: int = 0) -> list[int]:
    """How many entries each centroid of a head stands for."""
    pool = cache.layers[layer].pool
    if pool is None:
        return []
    found = pool.owner_tensors["counts"][cache.owners(row)[head]]
    return [int(count) for count in found[found > 0]]


def first_clusters(case: Case) -> Starts:
    """Where the policy's clusters start."""
    return lambda layer, kv_head, evicted: [evicted[i] for i in starts(len(evicted), case.rules.slots).tolist()]


def twin_of(case: Case, run: type[Run] = Run) -> Told:
    return told(case, run, first_clusters(case))


def check(case: Case, cls: type[ToldScores] = ToldScores, run: type[Run] = Run) -> None:
    """The same logits, kept positions, centroids and occupancy, after every pass."""
    twin = twin_of(case, run)
    cache = cache_of(case, policy_of(case, cls))
    measured: list[list[int]] = []
    for begin, end in case.parts:
        logits = forward(case.model(), cache, case.tokens[begin:end])
        torch.testing.assert_close(logits, twin.logits[begin:end], atol=1e-9, rtol=0)
        # What the policy holds is already what the next query sees.
        for (layer, head), seen in twin.seen[end].items() if end < case.length else ():
            assert kept(cache, layer, head) == seen[:-1], (end, layer, head)
            if end >= case.context:
                assert counts(cache, layer, head) == twin.counts[end][layer, head], (end, layer, head)
        if begin >= case.context and end == begin + 1:
            measured.append([len(seen) + len(twin.counts[begin][at]) for at, seen in twin.seen[begin].items()])
    occupancy = cache.rows[0].occupancy
    assert occupancy.steps == len(measured)
    assert occupancy.largest == max(map(max, measured), default=0)
    assert abs(occupancy.total - sum(sum(heads) / len(heads) for heads in measured)) < 1e-6
