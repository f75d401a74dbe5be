"""Results read back as data frames: one row per sample and repeat, and one per run and task."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError, unknown
from evictbench.registry import recorded_policy
from evictbench.stats.intervals import Interval, mean_interval, spread_interval
from evictbench.store import run_folder
from evictbench.store.files import visible_files
from evictbench.store.select import PROTOCOL

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

METRIC = "metric_"
"""Prefix of the columns that hold a task's own metrics."""

RUN_COLUMNS = {
    "suite": "suite",
    "model": "model, as it was named",
    "policy": "policy with the settings that differ from its defaults, as --policy takes it",
    "policy_name": "policy without its settings",
    "policy_settings": "every setting with its value, as JSON",
    "base_model": "the model that a fine-tuned one was made from; null for others",
    "base_weights": "hash of that model's weights",
    "transferred_from": "the model that the policy's weights were trained on, where it is another than the run's",
    "policy_source": "hash of the policy's file and of its weights, as JSON; null where it has neither",
    "budget": "budget as given (256, 25%); null for a policy without one",
    **PROTOCOL,
    "data": "the data files with their hashes, as JSON",
    "fingerprint": "twelve hex digits that stand for all of the above and the tasks and data",
    "folder": "folder of the run",
}
"""Columns that are the same for every sample of a run."""

RECENCY_COLUMNS = {
    "recency_share": "share of the kept entries inside a recency window",
    "recency_window": "the tokens of that window; same: as many as a head keeps",
    "recency_by_layer": "the share of each layer, a list",
}
"""Columns that are there where a run has measured them (--recency)."""

COLUMNS = RUN_COLUMNS | {
    "task": "task",
    "task_version": "version of the task",
    "doc_id": "number of the document in the task",
    "repeat": "number of the answer to that document, from 0",
    "score": "score, in [0, 1]",
    "metric_<name>": "each metric of the task, in its own unit; null for tasks without it",
    "answer": "the answer that was graded, where the task names one (with text=True)",
    "text": "the text that came out (with text=True)",
    "thinking": "none, closed or unclosed: what became of the thought",
    "truncated": "stopped by the token limit, or inside a thought",
    "repetition": "ends in a loop",
    "prompt_tokens": "tokens of the prompt",
    "border": "index of the first prompt token after the context, where the context alone is compressed",
    "prompt_hash": "hash of the prompt's token ids",
    "output_tokens": "tokens that came out",
    "token_limit": "tokens allowed",
    "occupancy_max": "most cache entries per KV head that a decode query saw",
    "occupancy_mean": "their mean",
    "cache_bytes": "bytes of the decode cache, this row's share",
    "prefill_peak_bytes": "most bytes of cache held while the prompt was read",
    "prefill_seconds": "seconds; for speed, use a trace",
    "first_token_seconds": "seconds until the first token",
    "decode_seconds": "seconds of decoding, this row's share",
    "decode_steps": "forward passes of decoding",
    "session": "number of the session in run.json (versions, device, commit) that made the sample",
    **RECENCY_COLUMNS,
}
"""The columns of `evictbench.results(...)`, and what each holds."""

MEANS = (
    "occupancy_mean",
    "cache_bytes",
    "prefill_peak_bytes",
    "prompt_tokens",
    "output_tokens",
    "truncated",
    "repetition",
)
"""Columns of `cells` that are the mean over samples; the shares among them are in [0, 1]."""

KEY = ["task", "doc_id", "repeat"]

TYPES = {
    "task": "string",
    "doc_id": "int64",
    "repeat": "int64",
    "score": "float64",
    "answer": "string",
    "thinking": "string",
    "text": "string",
    "output_tokens": "int64",
    "token_limit": "int64",
    "truncated": "bool_",
    "repetition": "bool_",
    "prompt_tokens": "int64",
    "border": "int64",
    "prompt_hash": "string",
    "occupancy_max": "int64",
    "occupancy_mean": "float64",
    "cache_bytes": "int64",
    "prefill_peak_bytes": "int64",
    "prefill_seconds": "float64",
    "first_token_seconds": "float64",
    "decode_seconds": "float64",
    "decode_steps": "int64",
    "session": "int64",
}
"""Fields of a line that are columns, and the names of their Arrow types. A metric is a float64."""


def read_results(folder: Path, *, text: bool = True) -> pd.DataFrame:
    """The samples of all runs in a folder, as `evictbench.results` gives them.

    folder: a results root, one run's folder, or any folder between. text: whether to read the answers' text.
    """
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    runs: list[dict[str, Any]] = []
    tables: list[pa.Table] = []
    for columns, lines in _runs(folder):
        runs.append(columns)
        tables.append(_table(lines, text))
    lengths = [table.num_rows for table in tables]
    if not any(lengths):
        raise UserError(f"No sample is finished yet in {folder}.")
    with_samples = [table for table in tables if table.num_rows]
    samples = pa.concat_tables(with_samples, promote_options="default").to_pandas(strings_to_categorical=False)
    number = np.repeat(np.arange(len(runs)), lengths)
    common = pd.DataFrame(runs)
    whole = {name: _spread(common[name], number) for name in RUN_COLUMNS}
    whole |= _task_columns(common["tasks"], samples["task"], number)
    frame = pd.DataFrame(dict(samples.items()) | whole, copy=False)
    run = pd.factorize(common["fingerprint"])[0][number]  # a copy of a run is the same run
    frame = _each_once(frame, run)
    order = [*RUN_COLUMNS, "task", "task_version", *(name for name in frame if name in samples)]
    return frame[list(dict.fromkeys(order))]


def cells(samples: pd.DataFrame, metric: str = "score") -> pd.DataFrame:
    """One row per run and task: `metric` (mean), `low` and `high` (its 95% interval, null for fewer than two
    documents), `documents`, `samples`, `occupancy_max`, the means of `MEANS`, and the run's columns.

    The mean is over documents, of each document's mean over its repeats. The interval takes documents as independent,
    as `evictbench run` does. metric: a column, or the name of a task's metric; tasks without it are left out.
    """
    import pandas as pd

    column = metric_column(samples, metric)
    kept = samples[samples[column].notna()]
    group = [kept["fingerprint"].astype(str), kept["folder"].astype(str), kept["task"].astype(str)]
    documents = kept[column].astype(float).groupby([*group, kept["doc_id"]], sort=True).mean()
    rows = []
    for key, values in documents.groupby(level=[0, 1, 2], sort=False):
        low, high = interval_of(values.tolist(), metric) or (None, None)
        rows.append((*key, values.mean(), low, high, len(values)))
    means = kept[[name for name in MEANS if name in kept]].astype(float).groupby(group).mean()
    means["occupancy_max"] = kept["occupancy_max"].groupby(group).max()
    means["samples"] = kept["occupancy_max"].groupby(group).size()
    index = ["fingerprint", "folder", "task"]
    frame = pd.DataFrame(rows, columns=[*index, metric, "low", "high", "documents"])
    frame = frame.astype({"low": float, "high": float})
    means = means.drop(columns=[name for name in means if name == metric])
    frame = frame.merge(means.rename_axis(index).reset_index(), on=index)
    columns = [name for name in (*RUN_COLUMNS, "task", "task_version") if name in kept]
    first = kept[columns].drop_duplicates(["fingerprint", "folder", "task"])
    first = first.astype(dict.fromkeys(index, str))
    return first.merge(frame, on=index)


def document_scores(run: pd.DataFrame) -> dict[tuple[str, int], float]:
    """The mean score over repeats of each document, by (task, doc_id). run: samples of one run."""
    means = run["score"].astype(float).groupby([run["task"].astype(str), run["doc_id"]]).mean()
    return {(str(task), int(doc_id)): float(mean) for (task, doc_id), mean in means.items()}


def interval_of(values: Sequence[float], metric: str) -> Interval | None:
    """The 95% interval of a mean over documents, inside [0, 1] for scores and for metrics of 0 and 1."""
    if metric == "score" or all(value in (0, 1) for value in values):
        return mean_interval(values)
    return spread_interval(values)


def metric_column(samples: pd.DataFrame, metric: str) -> str:
    """The column of a metric, named with or without the prefix `METRIC`. Raises UserError if there is none."""
    from pandas.api.types import is_numeric_dtype

    numbers = [name for name in samples if is_numeric_dtype(samples[name])]
    known = [str(name).removeprefix(METRIC) for name in numbers if name not in RUN_COLUMNS and name not in KEY]
    for name in (metric, METRIC + metric):
        if name in numbers and name.removeprefix(METRIC) in known:
            return name
    raise unknown("metric", metric, set(known))


def _runs(folder: Path) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The run columns and the samples of every run under a folder."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.")
    files = visible_files(folder, run_folder.RUN)
    at = {file.parent for file in files}
    stray = next((file for file in visible_files(folder, run_folder.SAMPLES) if file.parent not in at), None)
    if stray is not None:
        raise UserError(f"{stray.parent} holds samples but no {run_folder.RUN}: move it away.")
    if not files:
        raise UserError(f"There are no results in {folder}: make some with evictbench run.")
    for file in files:
        run = run_folder.read_run(file.parent)
        samples = run_folder.light_samples(file.parent, run)
        yield _run_columns(run, file.parent), list(samples.values())


def _run_columns(run: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The values of `RUN_COLUMNS` from a run.json, and `tasks`, a task's version by its name."""
    identity = run["identity"]
    policy, protocol = identity["policy"], identity["protocol"]
    label, settings = recorded_policy(policy)
    source = {
        name: value for name, value in policy.items() if name not in ("name", "label", "settings") and value is not None
    }
    columns = {name: identity[name] for name in ("suite", "model", "budget", "dtype", "weights", "seed")}
    columns |= {name: protocol.get(name) for name in RUN_COLUMNS if name in protocol}
    columns |= {
        "policy": label,
        "policy_name": policy["name"],
        "policy_settings": json.dumps(settings, sort_keys=True),
        "base_model": identity.get("base_model", {}).get("name"),
        "base_weights": identity.get("base_model", {}).get("sha256"),
        "transferred_from": (policy.get("weights") or {}).get("transferred_from"),
        "policy_source": json.dumps(source, sort_keys=True) if source else None,
        "protocol": protocol.get("name"),
        "differs": ", ".join(protocol.get("differs", ())),
        "data": json.dumps(identity["data"], sort_keys=True),
        "results_version": run["results_version"],
        "fingerprint": run["fingerprint"],
        "folder": str(folder),
    }
    return {name: columns.get(name) for name in RUN_COLUMNS} | {"tasks": dict(identity["tasks"])}


def _table(samples: Sequence[Mapping[str, Any]], text: bool) -> pa.Table:
    """The samples of a run as a table of the fields that they have, each metric in a column of its own."""
    import pyarrow as pa

    there = {name for sample in samples for name in sample} - (set() if text else {"text", "answer"})
    columns = {name: _column([sample.get(name) for sample in samples], TYPES[name]) for name in TYPES if name in there}
    if any("recency" in sample for sample in samples):
        columns |= _recency([sample.get("recency", {}) for sample in samples])
    for name in dict.fromkeys(name for sample in samples for name in sample["metrics"]):
        if name != "score":  # the score has its own column
            columns[METRIC + name] = _column([sample["metrics"].get(name) for sample in samples], "float64")
    return pa.table(columns)


def _recency(records: Sequence[Mapping[str, Any]]) -> dict[str, pa.Array]:
    """The columns of how recent the kept entries were; null for samples without it."""
    import pyarrow as pa

    return {
        "recency_share": _column([record.get("share") for record in records], "float64"),
        "recency_window": _column([record.get("window") for record in records], "string"),
        "recency_by_layer": pa.array([record.get("by_layer") for record in records], pa.list_(pa.float64())),
    }


def _column(values: Sequence[Any], kind: str) -> pa.Array:
    import pyarrow as pa

    if kind == "float64":  # a whole number that a file holds may be larger than an integer of Arrow's
        values = [None if value is None else float(value) for value in values]
    try:
        return pa.array(values, getattr(pa, kind)())
    except UnicodeEncodeError:  # half a surrogate pair is no UTF-8
        clean = [value.encode(errors="replace").decode() if value is not None else None for value in values]
        return pa.array(clean, getattr(pa, kind)())


def _each_once(frame: pd.DataFrame, run: Any) -> pd.DataFrame:
    """The frame with one line of each sample, the first. run: for each line, the number of its run. Raises UserError
    where two folders of one run have a sample with different results."""
    keys = frame[KEY].assign(run=run)
    twice = keys.duplicated()
    if not twice.any():
        return frame
    results = [name for name in frame if name == "score" or str(name).startswith(METRIC)]
    first = frame.groupby([keys[name] for name in keys], observed=True, sort=False)[results].transform("first")
    differ = (first != frame[results]) & (first.notna() | frame[results].notna())
    if differ.any(axis=None):
        line = frame[differ.any(axis=1)].iloc[0]
        same = frame[(keys == keys.loc[line.name]).all(axis=1)]
        folders = " and ".join(map(str, same["folder"].unique()))
        raise UserError(
            f"One run is in {folders}, with different results of {run_folder.named(line)}: move one of them away."
        )
    return frame[~twice].reset_index(drop=True)


def _spread(column: pd.Series, number: Any) -> Any:
    """Each run's value repeated for its samples. Strings become categories.

    column: a value per run. number: for each sample the number of its run.
    """
    import pandas as pd
    from pandas.api.types import is_numeric_dtype

    if is_numeric_dtype(column):
        return column.to_numpy()[number]
    codes, distinct = pd.factorize(column)
    return pd.Categorical.from_codes(codes[number], distinct)


def _task_columns(versions: pd.Series, task: pd.Series, number: Any) -> dict[str, Any]:
    """The columns `task` and `task_version`.

    versions: per run, the versions by task. task: per sample, its task. number: per sample, the number of its run.
    """
    import pandas as pd

    codes, names = pd.factorize(task)
    pairs, distinct = pd.factorize(number * len(names) + codes)
    version_of_pair = [versions.iloc[int(pair) // len(names)].get(names[int(pair) % len(names)]) for pair in distinct]
    return {
        "task": pd.Categorical.from_codes(codes, names),
        "task_version": _spread(pd.Series(version_of_pair, dtype=object).astype(str), pairs),
    }
