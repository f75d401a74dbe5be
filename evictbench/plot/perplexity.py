"""The figure of perplexity against budget, as StreamingLLM, H2O and DistillCache show it: its numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from evictbench.plot.data import Panels, budget_points
from evictbench.stats.ratios import perplexity, perplexity_increase
from evictbench.store.select import text_of, texts_of

if TYPE_CHECKING:
    import pandas as pd

NEEDS = ("nll", "nll_full")
"""Metrics that the samples must have."""

PARTS = {"ppl": "perplexity", "ppl_increase": "above the full cache"}
"""The panels: the metric that each shows, and its name."""


def perplexity_points(panels: Panels) -> pd.DataFrame:
    """One row per panel, policy and budget; every panel is there twice, for perplexity and for its increase.

    value: the perplexity over all tokens of all documents (`evictbench.stats.ratios`), or that less the full cache's on
    the same tokens; low, high: its 95% interval over documents. full: the full cache's perplexity on those tokens, from
    the dense pass that each comparison makes. tokens: how many. The other columns are those of `budget_points`, and
    `metric` names the panel's.
    """
    import pandas as pd

    frames = []
    for metric, title in PARTS.items():
        for name, samples in panels.items():
            points = budget_points({", ".join(filter(None, (name, title))): samples}, "nll")
            rows = [
                _measured(samples, policy, budget, metric)
                for policy, budget in zip(points["policy"], points["budget"], strict=True)
            ]
            frames.append(points.assign(metric=metric, **pd.DataFrame(rows, index=points.index)))
    return pd.concat(frames, ignore_index=True)


def _measured(samples: pd.DataFrame, policy: str, budget: str | None, metric: str) -> dict[str, float | None]:
    """value, low, high, full and tokens of a policy and budget."""
    mine = samples["policy"].astype(str).eq(policy) & texts_of(samples["budget"]).eq(text_of(budget))
    there = mine & samples["metric_nll"].notna() & (samples["output_tokens"] > 0)
    own = samples[there].drop_duplicates(["task", "doc_id", "repeat"])
    if own.empty:
        return dict.fromkeys(("value", "low", "high", "full", "tokens"), math.nan)
    tokens = own["output_tokens"].astype(float)
    sums = own[["metric_nll", "metric_nll_full"]].mul(tokens, axis=0).assign(tokens=tokens)
    documents = sums.groupby([own["task"].astype(str), own["doc_id"]]).sum()
    counts = documents["tokens"].tolist()
    nll, full = ((documents[f"metric_{name}"] / documents["tokens"]).tolist() for name in NEEDS)
    value, interval = perplexity(nll, counts) if metric == "ppl" else perplexity_increase(nll, full, counts)
    low, high = interval or (None, None)
    return {"value": value, "low": low, "high": high, "full": perplexity(full, counts)[0], "tokens": sum(counts)}
