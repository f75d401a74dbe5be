"""The page itself: a template filled in, with style and script inside, and a policy that forbids everything else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from evictbench import __version__
from evictbench.plot.style import LABELS, PERCENT
from evictbench.store.select import reading_of, text_of
from evictbench.terminal.units import human_bytes

if TYPE_CHECKING:
    import pandas as pd
    from markupsafe import Markup

    from evictbench.report.figures import Drawn
    from evictbench.report.protocol import Group
    from evictbench.report.samples import Browser
    from evictbench.report.tables import Board, Row
    from evictbench.report.warnings import Notice
    from evictbench.stats.paired import Difference

MINUS, DASH = "\N{MINUS SIGN}", "–"


@dataclass(frozen=True)
class Column:
    """A column of the leaderboard.

    meaning: of the heading. text: of a cell. value: what rows are sorted by; "" comes last. number: whether cells are
    numbers. minor: whether a narrow screen leaves the column out unless asked.
    """

    heading: str
    meaning: str
    text: Callable[[Row], str]
    value: Callable[[Row], float | str]
    number: bool = True
    minor: bool = False


def _policy(row: Row) -> str:
    """The policy, with the model that its weights are of where that is another."""
    return row.policy if row.transferred_from is None else f"{row.policy} (weights of {row.transferred_from})"


def columns(board: Board) -> list[Column]:
    """The columns of the leaderboard in order, with suite and model if there are several."""
    several = {name for name in ("suite", "model") if len({getattr(row, name) for row in board.rows}) > 1}
    seen = "cache entries per KV head that a decode query saw"
    every = [
        Column("policy", "eviction policy", _policy, lambda row: row.policy, number=False),
        Column(
            "budget",
            "cache entries per KV head, or a share of the text; where it is a target and no bound, what queries saw",
            lambda row: row.budget_seen,
            _budget_value,
        ),
        Column("suite", "suite", lambda row: row.suite, lambda row: row.suite, number=False, minor=True),
        Column("model", "model", lambda row: row.model, lambda row: row.model, number=False, minor=True),
        Column("task", "task", lambda row: row.task, lambda row: row.task, number=False, minor=True),
        Column(
            "prefill",
            "how the prompt was read: native to the policy, dense (whole, cut once) or bounded",
            lambda row: row.prefill if row.budget != text_of(None) else "nothing is cut",
            lambda row: row.prefill,
            number=False,
            minor=True,
        ),
        Column(
            "question",
            "whether the question was seen while the prompt was cut",
            lambda row: row.question,
            lambda row: row.question,
            number=False,
            minor=True,
        ),
        Column("score", "mean score, in percent", lambda row: f"{100 * row.score:.1f}", lambda row: row.score),
        Column("95% interval", "where the score could be, in percent", _interval, lambda row: row.score, minor=True),
        Column(
            "vs full",
            "points above the full cache, on the documents that both have",
            lambda row: "" if row.versus is None else _signed(100 * row.versus.value),
            _versus_value,
        ),
        Column(
            "its interval",
            "where that difference could be (95%, paired by document)",
            lambda row: _between(row.versus),
            _versus_value,
            minor=True,
        ),
        *(_metric(name, number > 0) for number, name in enumerate(board.metrics)),
        Column("n", "documents", lambda row: f"{row.documents}", lambda row: row.documents, minor=True),
        Column("seen, max", seen, lambda row: f"{row.occupancy_max}", lambda row: row.occupancy_max, minor=True),
        Column(
            "seen, mean",
            f"{seen}, mean",
            lambda row: f"{row.occupancy_mean:.4g}",
            lambda row: row.occupancy_mean,
            minor=True,
        ),
        _bytes("cache_bytes", "cache", "bytes of the decode cache, per sample"),
        _bytes("prefill_peak_bytes", "prefill peak", "most bytes of cache while the prompt was read, per sample"),
        _share("truncated", "cut off", "answers stopped by the token limit or inside their thought"),
        _share("repetition", "in a loop", "answers that end in a loop"),
    ]
    return [column for column in every if column.heading in several or column.heading not in ("suite", "model")]


def choices(board: Board) -> dict[str, list[str]]:
    """The choices of each filter of the leaderboard."""
    rows = board.rows

    def budget(text: str) -> tuple[bool, bool, float]:
        share = text.endswith("%")
        return (False, False, -1.0) if text == text_of(None) else (True, share, float(text.rstrip("%")))

    return {
        "suite": list(dict.fromkeys(row.suite for row in rows)),
        "model": list(dict.fromkeys(row.model for row in rows)),
        "budget": sorted({row.budget for row in rows}, key=budget),
    }


def render(
    title: str,
    samples: pd.DataFrame,
    board: Board,
    figures: Sequence[Drawn],
    runs: Sequence[Group],
    warnings: Sequence[Notice],
    browser: Browser,
) -> str:
    """The whole page as HTML. All text from outside is escaped, and only the page's own script may run."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    script, style = _file("assets/page.js"), _file("assets/page.css")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breakable"] = _breakable
    environment.filters["sentence"] = lambda text: text[:1].upper() + text[1:]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    by_kind: dict[str, list[Notice]] = {}
    for warning in warnings:
        by_kind.setdefault(warning.kind, []).append(warning)
    values: Mapping[str, Any] = {
        "title": title,
        "version": __version__,
        "counts": {
            "runs": samples["fingerprint"].nunique(),
            "answers": len(samples),
            "suites": samples["suite"].nunique(),
            "models": samples["model"].nunique(),
        },
        "reading": [
            f"{suite} on {model}: {reading_of(group)}"
            for (suite, model), group in samples.groupby(["suite", "model"], observed=True)
        ],
        "columns": columns(board),
        "rows": board.rows,
        "choices": choices(board),
        "tasks": sorted({row.task for row in board.rows if not row.task.startswith("mean of")}),
        "figures": [(figure, Markup(figure.svg)) for figure in figures],  # made here, by matplotlib, which escapes
        "map": next((figure.name for figure in figures if figure.name.startswith("retention")), ""),
        "groups": runs,
        "warnings": by_kind,
        "browser": browser,
        "style": Markup(style),
        "script": Markup(script),
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'",
    }
    return environment.from_string(_file("assets/page.html")).render(values)


def _interval(row: Row) -> str:
    return "" if row.interval is None else f"{100 * row.interval[0]:.1f}{DASH}{100 * row.interval[1]:.1f}"


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", MINUS)


def _between(difference: Difference | None) -> str:
    if difference is None or difference.low is None or difference.high is None:
        return ""
    return f"{_signed(100 * difference.low)} to {_signed(100 * difference.high)}"


def _versus_value(row: Row) -> float | str:
    return "" if row.versus is None else row.versus.value


def _budget_value(row: Row) -> float | str:
    """Shares of a text sort behind numbers of entries."""
    if row.budget == text_of(None):
        return ""
    return float(row.budget.rstrip("%")) + (1e12 if row.budget.endswith("%") else 0.0)


def _share(name: str, heading: str, meaning: str) -> Column:
    return Column(
        heading, meaning, lambda row: f"{100 * getattr(row, name):.0f}%", lambda row: getattr(row, name), minor=True
    )


def _bytes(name: str, heading: str, meaning: str) -> Column:
    return Column(
        heading, meaning, lambda row: human_bytes(getattr(row, name)), lambda row: getattr(row, name), minor=True
    )


def _metric(name: str, minor: bool) -> Column:
    scale = 100 if name in PERCENT else 1
    return Column(
        name.replace("_", " "),
        LABELS.get(name, "a metric of the task"),
        lambda row: f"{scale * row.metrics[name]:.3g}" if name in row.metrics else "",
        lambda row: row.metrics.get(name, ""),
        minor=minor,
    )


def _breakable(text: str) -> Markup:
    """Names break where a reader would: behind an underscore, a colon, a comma."""
    from markupsafe import Markup, escape

    return Markup(re.sub("([_:,=/])", r"\1<wbr>", str(escape(text))))


def _file(name: str) -> str:
    return (files("evictbench") / "report" / name).read_text(encoding="utf-8")
