"""Protocols and versions of runs: what the runs of a suite and model share, and what differs between them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.report.warnings import Notice
from evictbench.store import run_folder
from evictbench.store.select import PROTOCOL, text_of

if TYPE_CHECKING:
    import pandas as pd

NOT_VERSIONS = ("started", "batch_size")
"""Fields of a session that may differ without a warning."""

MOST_NAMED = 3
"""Values that a sentence names."""

COMMIT, SOURCE = "commit", "policy source"


@dataclass(frozen=True)
class Value:
    """A setting of a run. odd: it is not that of most runs beside it."""

    text: str
    odd: bool


@dataclass(frozen=True)
class Line:
    """One run: its fingerprint, what names it, and its values of the settings that differ."""

    run: str
    policy: str
    budget: str
    settings: str
    samples: int
    values: Sequence[Value]


@dataclass(frozen=True)
class Group:
    """The runs of a suite and model: settings that all share, and the columns of those that differ."""

    suite: str
    model: str
    shared: Mapping[str, str]
    columns: Sequence[str]
    lines: Sequence[Line]
    commits: Sequence[str]
    mixed: Sequence[str]


def groups(samples: pd.DataFrame) -> list[Group]:
    """The groups of these samples, in the order of the results."""
    return [
        _group(str(suite), str(model), group)
        for (suite, model), group in samples.groupby(["suite", "model"], observed=True)
    ]


def warnings(groups: Sequence[Group]) -> Iterator[Notice]:
    """Mixed commits and library versions, and commits with changes that were not committed."""
    for group in groups:
        where = f"{group.suite} on {group.model}"
        clean = {commit.partition("+")[0] for commit in group.commits}
        if len(clean) > 1:
            text = f"{where}: samples were made at {len(clean)} commits of evictbench ({_some(sorted(clean), 7)})."
            yield Notice("mixed commits", text)
        if any("+" in commit for commit in group.commits):
            yield Notice("mixed commits", f"{where}: some samples were made with changes that no commit holds.")
        if group.mixed:
            text = f"{where}: samples were made with different versions or on different devices: "
            yield Notice("mixed versions", text + "; ".join(group.mixed) + ".")


def _group(suite: str, model: str, samples: pd.DataFrame) -> Group:
    runs = [run for _, run in samples.groupby("fingerprint", observed=True, sort=False)]
    sessions = [_sessions(run) for run in runs]
    settings = [_settings(run) | _versions(made) for run, made in zip(runs, sessions, strict=True)]
    names = list(dict.fromkeys(name for run in settings for name in run))
    differing = [name for name in names if len({run.get(name, "") for run in settings}) > 1]
    policies = [str(run["policy"].iloc[0]) for run in runs]

    def odd(name: str, number: int) -> bool:
        """Policies have weights of their own, so only those of one policy should be alike."""
        beside = [
            run.get(name, "")
            for policy, run in zip(policies, settings, strict=True)
            if name != SOURCE or policy == policies[number]
        ]
        return 2 * beside.count(settings[number].get(name, "")) <= len(beside)

    lines = []
    for number, (run, values) in enumerate(zip(runs, settings, strict=True)):
        first = run.iloc[0]
        own = json.loads(str(first["policy_settings"]))
        lines.append(
            Line(
                run=str(first["fingerprint"]),
                policy=str(first["policy"]),
                budget=text_of(first["budget"]),
                settings=", ".join(f"{name}={text_of(value)}" for name, value in own.items()),
                samples=len(run),
                values=[Value(values.get(name, ""), odd(name, number)) for name in differing],
            )
        )
    lines.sort(key=lambda line: (line.policy, len(line.budget), line.budget))
    shared = {name: settings[0][name] for name in names if name not in differing}
    shared = {name: value for name, value in shared.items() if value not in ("", text_of(None))}
    every = [session for made in sessions for session in made]
    commits = sorted({str(session[COMMIT]) for session in every if session.get(COMMIT)})
    mixed = []
    for name in dict.fromkeys(name for session in every for name in session):
        distinct = sorted({text_of(session.get(name)) for session in every})
        if name not in (*NOT_VERSIONS, COMMIT) and len(distinct) > 1:
            mixed.append(f"{name} {_some(distinct)}")
    return Group(suite, model, shared, differing, lines, commits, mixed)


def _settings(run: pd.DataFrame) -> dict[str, str]:
    first = run.iloc[0]
    settings = {name.replace("_", " "): text_of(first[name]) for name in PROTOCOL}
    versions = run.drop_duplicates("task")[["task", "task_version"]].astype(str).itertuples(index=False)
    settings["tasks"] = ", ".join(f"{task} (version {version})" for task, version in sorted(versions))
    settings |= {f"data: {name}": text_of(value) for name, value in json.loads(str(first["data"])).items()}
    source = first["policy_source"]
    if isinstance(source, str):
        settings[SOURCE] = _flat(json.loads(source))
    return settings


def _sessions(run: pd.DataFrame) -> list[dict[str, Any]]:
    """The sessions that made samples of a run, as its run.json tells them."""
    sessions = []
    for folder, part in run.groupby("folder", observed=True):
        known = run_folder.read_run(Path(str(folder)))["sessions"]
        used = part["session"].dropna().unique() if "session" in part else []
        sessions += [known[int(number)] for number in sorted(used) if int(number) < len(known)]
    return sessions


def _versions(sessions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    names = dict.fromkeys(name for session in sessions for name in session if name != "started")
    values = {name: sorted({text_of(session.get(name)) for session in sessions}) for name in names}
    versions = {name.replace("_", " "): _some(texts, 7 if name == COMMIT else None) for name, texts in values.items()}
    days = sorted({str(session["started"])[:10] for session in sessions if session.get("started")})
    return versions | ({"made on": " to ".join(dict.fromkeys((days[0], days[-1])))} if days else {})


def _flat(values: Mapping[str, Any]) -> str:
    """A nested mapping as text, with hashes cut to twelve digits."""
    texts = {name: _flat(value) if isinstance(value, dict) else text_of(value) for name, value in values.items()}
    text = ", ".join(f"{name} {value}" for name, value in texts.items() if value)
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b", r"\1", text)


def _some(values: Sequence[str], length: int | None = None) -> str:
    """The first few values as text. length: digits to which commits are cut, with their mark of changes kept."""
    if length is not None:
        parts = [value.partition("+") for value in values]
        values = [commit[:length] + plus + rest for commit, plus, rest in parts]
    more = f" and {len(values) - MOST_NAMED} more" if len(values) > MOST_NAMED else ""
    return ", ".join(values[:MOST_NAMED]) + more
