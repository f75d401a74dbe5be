"""Which samples a command looks at, and which of them may stand in one plot or table: those of one protocol."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evictbench.errors import UserError, unknown
from evictbench.registry import parse_label, split_policies

if TYPE_CHECKING:
    import pandas as pd


SAMPLING = ("temperature", "top_p", "top_k", "min_p")

PROTOCOL = {
    "protocol": "name of the protocol",
    "differs": "what the options changed of it, comma-separated",
    "context": "tokens per sample, where the suite is made to a length",
    "question": "is the question seen while the context is compressed: seen, unseen",
    "chat": "whether the chat template is used",
    "chat_template": "the template's name and hash, where it is not the default one with plain texts",
    "thoughts": "whether the template lets the model think",
    "system_prompt": "what the system says in the template, where that is not the template's own",
    "temperature": "sampling; 0 is greedy",
    "top_p": "sampling",
    "top_k": "sampling; 0 is all tokens",
    "min_p": "sampling",
    "max_new_tokens": "a number, card or auto",
    "end_tokens": "ids that end an answer, where they are more than the model's generation config states",
    "card_limit": "tokens that the protocol allows an answer; null where each task says",
    "prefill": "native, dense or bounded",
    "chunk": "prompt tokens per forward pass, where that changes the result",
    "dtype": "dtype of the model",
    "weights": "hash of the model's weights",
    "seed": "seed of data and sampling",
    "results_version": "version of evictbench's results; two versions never mix",
}
"""The columns that say how a run was made, and what each holds; its suite, model, policy, budget, tasks and data come
beside them. `differs` follows from the others."""

BUDGETED = ("prefill", "chunk")
"""Columns of the protocol in which only runs with a budget must be alike: without one, nothing is evicted."""

SHARED = tuple(name for name in PROTOCOL if name not in ("differs", *BUDGETED))
"""Columns of the protocol in which all runs of one plot or table must be alike."""

OF_A_POLICY = ("policy_settings", "policy_source")
"""Columns in which the runs of one policy and budget must be alike."""

PANELS = ("suite", "model", "task", *SHARED, *BUDGETED, "budget", "policy", "policy_name", *OF_A_POLICY)
"""Columns that --by and --where take."""

FULL = "full"
"""Name of the policy that evicts nothing: the full cache, which the others are compared with."""


@dataclass(frozen=True)
class Filters:
    """The options that say which samples a command looks at, as given: comma lists, None for all values. where: strings
    "column=value"."""

    suite: str | None = None
    model: str | None = None
    task: str | None = None
    policy: str | None = None
    budget: str | None = None
    where: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """The filters as words of a command line."""
        given = [(name, getattr(self, name)) for name in ("suite", "model", "task", "policy", "budget")]
        given += [("where", condition) for condition in self.where]
        return [word for name, value in given if value is not None for word in (f"--{name}", value)]


ALL = Filters()
"""Every sample."""


def wanted_values(filters: Filters) -> dict[str, list[str]]:
    """The values that the filters want of each column, for `choose`. Raises UserError for a `where` without "="."""
    chosen: dict[str, list[str]] = {}
    for column in ("suite", "model", "task", "budget"):
        given = getattr(filters, column)
        if given is not None:
            chosen[column] = comma_list(given)
    if filters.policy is not None:
        chosen["policy"] = split_policies(filters.policy)
    for pair in filters.where:
        column, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--where takes column=value, and not {pair!r}.")
        chosen.setdefault(column.strip(), []).append(value.strip())
    return chosen


def comma_list(text: str) -> list[str]:
    """The items of a comma-separated list, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def choose(samples: pd.DataFrame, chosen: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """The samples whose columns have one of the wanted values.

    Raises UserError for an unknown column or value, with those of similar name, and if no sample is left.
    """
    kept = samples["doc_id"].notna()
    for column, values in chosen.items():
        check_column(column)
        texts = texts_of(samples[column])
        known = set(texts.unique())
        for value in values:
            if value not in known:
                raise unknown(column, value, known, " in these results")
        kept &= texts.isin(list(values))
        if not kept.any():
            raise UserError(f"No sample with {column} {', '.join(values)} is among those that the other options leave.")
    return samples[kept]


def check_column(column: str) -> None:
    """Raise UserError unless --by and --where take the column."""
    if column not in PANELS:
        raise unknown("column", column, PANELS)


def text_of(value: object) -> str:
    """A column's value as filters take it: none, yes, no, 0.6, ..."""
    if value is None or value != value:
        return "none"
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def reading_of(samples: pd.DataFrame) -> str:
    """How the prompts were read, as every table and figure of scores says it: "prefill dense, question unseen".

    Runs without a budget cut nothing, and are passed over where others are there.
    """
    budgeted = samples[samples["budget"].notna()]
    if budgeted.empty:
        return reading_words([], texts_of(samples["question"]).unique())
    return reading_words(texts_of(budgeted["prefill"]).unique(), texts_of(budgeted["question"]).unique())


def reading_words(prefills: Iterable[str], questions: Iterable[str]) -> str:
    """`reading_of` runs with these prefill modes and questions; without a mode nothing is cut."""
    prefill = " and ".join(f"prefill {mode}" for mode in sorted(set(prefills))) or "no prompt is cut"
    return f"{prefill}, {' and '.join(f'question {seen}' for seen in sorted(set(questions)))}"


def texts_of(column: pd.Series) -> pd.Series:
    """`text_of` each value of a column."""
    import pandas as pd

    codes, values = pd.factorize(column, use_na_sentinel=False)
    texts = pd.Series([text_of(value) for value in values], dtype=object)
    return pd.Series(texts.to_numpy()[codes], index=column.index)


def check_one_protocol(samples: pd.DataFrame, where: str, allowed: Collection[str] = ()) -> None:
    """Raise UserError, naming what differs, unless all samples were made under one protocol with the same data.

    where: what the samples have in common, for the sentence. allowed: columns in which runs of different policies may
    differ. Runs of one policy and budget may not, or a point would stand for two things.
    """
    runs = samples.drop_duplicates(["fingerprint", "folder"])
    differing = [_differs(name, runs) for name in SHARED]
    budgeted = runs[runs["budget"].notna()]
    differing += [_differs("prefill", budgeted), _differs("chunk", budgeted[budgeted["chunk"].notna()])]
    versions = samples.drop_duplicates(["fingerprint", "folder", "task"])
    for task, of_task in versions.groupby("task", observed=True):
        differing.append(_differs("task_version", of_task, f"the version of {task}"))
    differing.append(_data_differs(runs))
    forbidden = [difference for difference in differing if difference is not None and difference[0] not in allowed]
    if forbidden:
        column = next((name for name, _ in forbidden if name in PANELS), None)
        advice = (
            f"Take one with --where {column}=..., make a panel for each with --by {column}, or, where it is meant, "
            f"--allow {column}."
            if column
            else "Keep them in folders apart."
        )
        sentences = "; ".join(sentence for _, sentence in forbidden)
        raise UserError(f"Runs of two protocols do not go into one plot ({where}): {sentences}. {advice}")
    for (policy, budget), cell in runs.groupby(["policy", "budget"], observed=True, dropna=False):
        for name in (*OF_A_POLICY, *allowed):
            difference = _differs(name, cell)
            if difference is not None:
                raise UserError(
                    f"{policy} {text_of(budget)} stands for two things ({where}): {difference[1]}. Take one with "
                    f"--where '{name}=...', or a panel for each with --by {name}."
                )


def by_protocol(
    samples: pd.DataFrame, allowed: Collection[str] = (), by: str | None = None
) -> list[tuple[str, pd.DataFrame]]:
    """The samples of each protocol, and what tells it from the others in words ("context 1024, question seen").

    `check_one_protocol` takes every part. allowed: as there. by: a column that has a panel for each value. Runs that a
    difference does not concern are in every part: the full cache, where policies differ in prefill; runs that use none
    of the data that differ.
    """
    number = samples.groupby(["fingerprint", "folder", "task"], observed=True, sort=False).ngroup()
    rows = samples.assign(number=number).drop_duplicates("number")
    budgeted, task = rows["budget"].notna(), rows["task"].astype(str)
    cell = texts_of(rows["policy"]) + " " + texts_of(rows["budget"])
    files = rows["data"].astype(object).map(json.loads)
    keys = [(name, texts_of(rows[name])) for name in SHARED if name not in (*allowed, by)]
    keys += [
        (name, texts_of(rows[name]).where(budgeted & (rows[name].notna() | (name != "chunk"))))
        for name in BUDGETED
        if name not in (*allowed, by)
    ]
    keys += [(f"version of {own}", texts_of(rows["task_version"]).where(task == own)) for own in sorted(task.unique())]
    keys += [
        (f"data of {name}", files.map(lambda known, name=name: known.get(name)).astype(object))
        for name in sorted({name for known in files for name in known})
    ]
    keys += [
        (f"{name} of {own}", texts_of(rows[name]).where(cell == own))
        for name in (*OF_A_POLICY, *allowed)
        if name != by
        for own in sorted(cell.unique())
    ]
    parts = [("", rows)]
    for title, values in keys:
        if values.nunique() > 1:
            parts = _divided(parts, values, title)
    return [
        (words, samples if len(part) == len(rows) else samples[number.isin(part["number"])]) for words, part in parts
    ]


def _divided(parts: Sequence[tuple[str, pd.DataFrame]], keys: pd.Series, title: str) -> list[tuple[str, pd.DataFrame]]:
    """Parts whose rows have one key: a part with several is divided. A row whose key is null is in all."""
    divided = []
    for words, part in parts:
        values = keys[part.index]
        distinct = sorted(values.dropna().unique(), key=str)
        if len(distinct) < 2:
            divided.append((words, part))
            continue
        for value in distinct:
            own = part[(values == value) | values.isna()]
            divided.append((", ".join(filter(None, (words, f"{title} {value}"))), own))
    return divided


def common_tasks(samples: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The samples of the tasks that every policy and budget has, and a sentence about each task left out."""
    cells = samples[["policy", "budget", "task"]].drop_duplicates().apply(texts_of)
    count = len(cells.drop_duplicates(["policy", "budget"]))
    have = cells.groupby("task").size()
    left_out = sorted(have.index[have < count])
    if len(left_out) == len(have):
        raise UserError(f"No task was run under every policy and budget: choose with --task ({', '.join(left_out)}).")
    sentences = [
        f"{task} is left out: {have[task]} of {count} policies and budgets have samples of it." for task in left_out
    ]
    return samples[~samples["task"].astype(str).isin(left_out)], sentences


def uneven_tasks(samples: pd.DataFrame) -> list[str]:
    """A sentence about each task for which policies and budgets have different documents."""
    documents = samples[["policy", "budget", "task", "doc_id"]].drop_duplicates()
    documents = documents.assign(budget=texts_of(documents["budget"]))
    sentences = []
    for task, of_task in documents.groupby("task", observed=True):
        sizes = of_task.groupby(["policy", "budget"], observed=True).size()
        if sizes.min() != len(of_task["doc_id"].unique()):
            sentences.append(
                f"Not every policy and budget has the same samples of {task} ({sizes.min()} to {sizes.max()} of them): "
                "--paired keeps those that all have."
            )
    return sentences


def paired_documents(samples: pd.DataFrame) -> pd.DataFrame:
    """The samples of the documents that every policy and budget has. Raises UserError if a task has none."""
    cells = samples[["policy", "budget", "task", "doc_id"]].drop_duplicates()
    cells = cells.assign(**{name: texts_of(cells[name]) for name in ("policy", "budget", "task")})
    per_task = cells.drop_duplicates(["policy", "budget", "task"]).groupby("task").size()
    have = cells.groupby(["task", "doc_id"]).size()
    whole = {key for key, count in have.items() if count == per_task[key[0]]}
    keys = zip(samples["task"].astype(str), samples["doc_id"], strict=True)
    kept = samples[[key in whole for key in keys]]
    missing = sorted(set(per_task.index) - set(kept["task"].astype(str)))
    if missing:
        raise UserError(f"No document of {missing[0]} has been answered under every policy and budget yet.")
    return kept


def budget_bounds(labels: Iterable[str]) -> dict[str, bool]:
    """Whether the budget of each policy is a bound that the engine checks; True for policies not installed here, and
    for settings that the installed policy does not take."""
    bounds = {}
    for label in labels:
        bounds[label] = True
        with suppress(Exception):  # a policy's own code, and settings that nobody has checked
            chosen = parse_label(label)
            bounds[label] = bool(chosen.policy(chosen.config).enforces_budget)
    return bounds


def entries_seen(mean: float, most: float) -> str:
    """What decode queries saw, as it stands beside a budget that is no bound: "saw 75.0, a head at most 113"."""
    return f"saw {mean:.{0 if mean >= 99.5 else 1}f}, a head at most {most:.0f}"


def budget_with_seen(budget: object, bound: bool, mean: float, most: float) -> str:
    """A budget as a table names it: "128", or where it is no bound (`budget_bounds`) "128 (saw 75.0, a head at most
    113)".

    mean, most: of the entries per KV head that a decode query saw.
    """
    text = text_of(budget)
    return text if bound or text == text_of(None) else f"{text} ({entries_seen(mean, most)})"


def comparable(samples: pd.DataFrame) -> pd.Series:
    """The number of each sample's group. Runs of a group have one suite, model, protocol and data, and may differ in
    prefill, chunk, policy and budget."""
    import pandas as pd

    runs = samples.drop_duplicates("fingerprint").set_index("fingerprint")
    keys = {}
    for fingerprint, run in runs.iterrows():
        data = sorted(json.loads(str(run["data"])).items())
        keys[fingerprint] = (run["suite"], run["model"], *(text_of(run[name]) for name in SHARED), str(data))
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
    return pd.Series([numbers[keys[mark]] for mark in samples["fingerprint"]], index=samples.index, name="group")


def _differs(name: str, runs: pd.DataFrame, title: str | None = None) -> tuple[str, str] | None:
    """The column and a sentence about its values, if the runs have several; title: what the sentence calls it."""
    values = texts_of(runs[name])
    distinct = list(dict.fromkeys(values))
    if len(distinct) < 2:
        return None
    parts = []
    for value in distinct[:3]:
        row = runs[values == value].iloc[0]
        parts.append(f"{value} ({row['policy']} {text_of(row['budget'])})")
    return name, f"{title or name} is {' and '.join(parts)}"


def _data_differs(runs: pd.DataFrame) -> tuple[str, str] | None:
    """ "data" and a sentence about the first data file of which the runs have several versions."""
    known: dict[str, str] = {}
    for text in runs["data"].unique():
        for name, value in json.loads(text).items():
            if known.setdefault(name, value) != value:
                return "data", f"the data of {name} is {known[name]} and {value}"
    return None
