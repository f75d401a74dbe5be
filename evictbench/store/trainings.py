"""Runs that differ in nothing but the weights of a learned policy: several trainings, which may form one row."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from evictbench.store.select import text_of

if TYPE_CHECKING:
    import pandas as pd

TRAINING = "training"
"""The column that names a run's training: the hash of its policy's weights; "" for a policy without any."""


def as_one_row(samples: pd.DataFrame) -> pd.DataFrame:
    """The samples with the column `TRAINING`, and with a `policy_source` that says nothing of the weights' hash, so
    that runs of several trainings may stand in one row: those of one policy, with the same settings and code."""
    distinct = samples["policy_source"].astype(object).unique()
    split = {text_of(source): _split(source) for source in distinct}
    texts = samples["policy_source"].astype(object).map(text_of)
    return samples.assign(
        policy_source=texts.map({text: rest for text, (_, rest) in split.items()}).astype(object),
        **{TRAINING: texts.map({text: training for text, (training, _) in split.items()}).astype(object)},
    )


def several(samples: pd.DataFrame) -> dict[tuple[str, str], int]:
    """The number of trainings of each policy and budget, in words, that has more than one. samples: of `as_one_row`."""
    rows = samples.drop_duplicates(["policy", "budget", TRAINING])
    counts = rows.groupby([rows["policy"].astype(str), rows["budget"].astype(object).map(text_of)])[TRAINING].nunique()
    return {(str(policy), str(budget)): int(count) for (policy, budget), count in counts.items() if count > 1}


def _split(source: object) -> tuple[str, str | None]:
    """The training that a `policy_source` names, and the source without it."""
    if not isinstance(source, str):
        return "", None
    content = json.loads(source)
    weights = content.get("weights")
    if not isinstance(weights, dict) or "sha256" not in weights:
        return "", source
    rest = {**content, "weights": {name: value for name, value in weights.items() if name != "sha256"}}
    return str(weights["sha256"]), json.dumps(rest, sort_keys=True)
