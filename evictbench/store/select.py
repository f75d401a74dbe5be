"""Which samples go into a plot, and whether they may stand in one: filters, and one protocol for all."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.registry import split_policies, unknown

if TYPE_CHECKING:
    import pandas as pd


SHARED = (
    "protocol",
    "context",
    "question",
    "chat",
    "thoughts",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_new_tokens",
    "card_limit",
    "dtype",
    "weights",
    "seed",
    "results_version",
)
"""Columns in which all runs of one plot are alike."""

BUDGETED = ("prefill", "chunk")
"""And those in which the runs under a budget are: without one, nothing is cut."""

OF_A_POLICY = ("policy_settings", "policy_source")
"""And those in which the runs of one policy and budget are."""

PANELS = ("suite", "model", "task", *SHARED, *BUDGETED, "budget", "policy", "policy_name", *OF_A_POLICY)
"""Columns that --by and --where take."""


@dataclass(frozen=True)
class Filters:
    """The options that say which samples a command looks at, as given: comma lists, None for all of them; where:
    column=value each."""

    suite: str | None = None
    model: str | None = None
    task: str | None = None
    policy: str | None = None
    budget: str | None = None
    where: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """The same as words of a command line."""
        words = [(name, getattr(self, name)) for name in ("suite", "model", "task", "policy", "budget")]
        words += [("where", pair) for pair in self.where]
        return [word for name, value in words if value is not None for word in (f"--{name}", value)]


ALL = Filters()
"""Every sample."""


def asked(filters: Filters) -> dict[str, list[str]]:
    """The values that are asked for of each column, for `choose`."""
    chosen: dict[str, list[str]] = {}
    for column in ("suite", "model", "task", "budget"):
        given = getattr(filters, column)
        if given is not None:
            chosen[column] = listed(given)
    if filters.policy is not None:
        chosen["policy"] = split_policies(filters.policy)
    for pair in filters.where:
        column, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--where takes column=value, and not {pair!r}.")
        chosen.setdefault(column.strip(), []).append(value.strip())
    return chosen


def listed(text: str) -> list[str]:
    """The words of a comma list, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def choose(samples: pd.DataFrame, chosen: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """The samples whose columns have one of the values asked for; UserError names the near ones of an unknown one."""
    kept = samples["doc_id"].notna()
    for column, values in chosen.items():
        check_column(column)
        words = in_words(samples[column])
        known = set(words.unique())
        for value in values:
            if value not in known:
                raise unknown(column, value, known, " in these results")
        kept &= words.isin(list(values))
        if not kept.any():
            raise UserError(f"No sample with {column} {', '.join(values)} is among those that the other options leave.")
    return samples[kept]


def check_column(column: str) -> None:
    """UserError for what is no column that samples are told apart by."""
    if column not in PANELS:
        raise unknown("column", column, PANELS)


def said(value: object) -> str:
    """A value of a column in one word, as filters take it: none, yes, no, 0.6, ..."""
    if value is None or value != value:
        return "none"
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def in_words(column: pd.Series) -> pd.Series:
    """`said` of every value."""
    import pandas as pd

    codes, values = pd.factorize(column, use_na_sentinel=False)
    words = pd.Series([said(value) for value in values], dtype=object)
    return pd.Series(words.to_numpy()[codes], index=column.index)


def check_one_protocol(samples: pd.DataFrame, where: str, allowed: Collection[str] = ()) -> None:
    """UserError, naming what differs, unless all samples were made under one protocol on one model and data.

    where: what the samples have in common, for the sentence. allowed: columns in which the runs of different policies
    may differ; those of one policy and budget never may, or a point would stand for two things.
    """
    runs = samples.drop_duplicates(["fingerprint", "folder"])
    differing = [_differs(name, runs) for name in SHARED]
    budgeted = runs[runs["budget"].notna()]
    differing += [_differs("prefill", budgeted), _differs("chunk", budgeted[budgeted["chunk"].notna()])]
    versions = samples.drop_duplicates(["fingerprint", "folder", "task"])
    for task, of_task in versions.groupby("task", observed=True):
        differing.append(_differs("task_version", of_task, f"the version of {task}"))
    differing.append(_data_differs(runs))
    found = [pair for pair in differing if pair is not None and pair[0] not in allowed]
    if found:
        column = next((name for name, _ in found if name in PANELS), None)
        advice = (
            f"Take one with --where {column}=..., make a panel for each with --by {column}, or, where it is meant, "
            f"--allow {column}."
            if column
            else "Keep them in folders apart."
        )
        sentences = "; ".join(sentence for _, sentence in found)
        raise UserError(f"Runs of two protocols do not go into one plot ({where}): {sentences}. {advice}")
    for (policy, budget), cell in runs.groupby(["policy", "budget"], observed=True, dropna=False):
        for name in (*OF_A_POLICY, *allowed):
            pair = _differs(name, cell)
            if pair is not None:
                raise UserError(
                    f"{policy} {said(budget)} stands for two things ({where}): {pair[1]}. Take one with --where "
                    f"'{name}=...', or a panel for each with --by {name}."
                )


def _differs(name: str, runs: pd.DataFrame, words: str | None = None) -> tuple[str, str] | None:
    values = in_words(runs[name])
    distinct = list(dict.fromkeys(values))
    if len(distinct) < 2:
        return None
    parts = []
    for value in distinct[:3]:
        row = runs[values == value].iloc[0]
        parts.append(f"{value} ({row['policy']} {said(row['budget'])})")
    return name, f"{words or name} is {' and '.join(parts)}"


def _data_differs(runs: pd.DataFrame) -> tuple[str, str] | None:
    known: dict[str, str] = {}
    for text in runs["data"].unique():
        for name, value in json.loads(text).items():
            if known.setdefault(name, value) != value:
                return "data", f"the data of {name} is {known[name]} and {value}"
    return None


def whole_tasks(samples: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The samples of those tasks that every policy and budget has, and a sentence about each task left out."""
    cells = samples[["policy", "budget", "task"]].drop_duplicates().apply(in_words)
    count = len(cells.drop_duplicates(["policy", "budget"]))
    have = cells.groupby("task").size()
    left_out = sorted(have.index[have < count])
    if len(left_out) == len(have):
        raise UserError(f"No task was run under every policy and budget: choose with --task ({', '.join(left_out)}).")
    sentences = [
        f"{task} is left out: {have[task]} of {count} policies and budgets have samples of it." for task in left_out
    ]
    return samples[~samples["task"].astype(str).isin(left_out)], sentences


def uneven(samples: pd.DataFrame) -> list[str]:
    """A sentence for each task of which not every policy and budget has the same documents."""
    documents = samples[["policy", "budget", "task", "doc_id"]].drop_duplicates()
    documents = documents.assign(budget=in_words(documents["budget"]))
    sentences = []
    for task, of_task in documents.groupby("task", observed=True):
        sizes = of_task.groupby(["policy", "budget"], observed=True).size()
        if sizes.min() != len(of_task["doc_id"].unique()):
            sentences.append(
                f"Not every policy and budget has the same samples of {task} ({sizes.min()} to {sizes.max()} of them): "
                "--paired keeps those that all have."
            )
    return sentences


def paired(samples: pd.DataFrame) -> pd.DataFrame:
    """Only those documents that every policy and budget has."""
    cells = samples[["policy", "budget", "task", "doc_id"]].drop_duplicates()
    cells = cells.assign(**{name: in_words(cells[name]) for name in ("policy", "budget", "task")})
    per_task = cells.drop_duplicates(["policy", "budget", "task"]).groupby("task").size()
    have = cells.groupby(["task", "doc_id"]).size()
    whole = {key for key, count in have.items() if count == per_task[key[0]]}
    keys = zip(samples["task"].astype(str), samples["doc_id"], strict=True)
    kept = samples[[key in whole for key in keys]]
    missing = sorted(set(per_task.index) - set(kept["task"].astype(str)))
    if missing:
        raise UserError(f"No document of {missing[0]} has been answered under every policy and budget yet.")
    return kept


def guarded(labels: Iterable[str]) -> dict[str, bool]:
    """Of each policy, whether its budget is a bound that the engine checks; True for those not installed here."""
    from evictbench import registry

    found = {}
    for label in labels:
        try:
            chosen = registry.parse_policy(label)
            found[label] = chosen.policy(chosen.config).guarded
        except UserError:
            found[label] = True
    return found


def comparable(samples: pd.DataFrame) -> pd.Series:
    """For each sample the number of its group: one suite, model, protocol and data. Prefill, policy and budget may
    differ in it."""
    import pandas as pd

    runs = samples.drop_duplicates("fingerprint").set_index("fingerprint")
    keys = {}
    for fingerprint, run in runs.iterrows():
        data = sorted(json.loads(str(run["data"])).items())
        keys[fingerprint] = (run["suite"], run["model"], *(said(run[name]) for name in SHARED), str(data))
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
    return pd.Series([numbers[keys[mark]] for mark in samples["fingerprint"]], index=samples.index, name="group")
