"""The figures of a folder of runs or of a trace, with their numbers, ready to be drawn."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.plot import data, figures, trace
from evictbench.plot.answers import answer_panels, answer_points, has_lost_answers
from evictbench.plot.perplexity import NEEDS, perplexity_points
from evictbench.plot.recency import SHARE, WINDOW, recency_points, recency_shares
from evictbench.plot.request import OF_RUNS, Drawing, PlotRequest
from evictbench.plot.trainings import with_trainings
from evictbench.store import select
from evictbench.store.frame import metric_column, read_results
from evictbench.store.trace_files import is_trace
from evictbench.store.trainings import as_one_row, several

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LACKS = {
    "fidelity": "no KL and no perplexity: --figures fidelity takes runs of the suite fidelity.",
    "perplexity": "no log-likelihoods: --figures perplexity takes runs of the suite fidelity.",
    "recency": "no share of kept entries inside a recency window: it is measured by evictbench run --recency.",
}
"""What is missing where a figure is asked for that the runs have no numbers for."""

LONGEST_NAME = 150
"""Letters of a figure's name, which is that of its files."""


def drawings(request: PlotRequest, names: Sequence[str] | None, warn: Callable[[str], None]) -> Iterator[Drawing]:
    """The figures of a folder.

    names: of figures, None for all that the folder has data for. warn: called with each sentence that the reader of a
    figure should know. Raises UserError for what cannot be drawn.
    """
    if is_trace(request.folder):
        yield from trace.drawings(request, names)
    else:
        yield from _run_drawings(request, names, warn)


def _run_drawings(request: PlotRequest, names: Sequence[str] | None, warn: Callable[[str], None]) -> Iterator[Drawing]:
    samples = select.choose(read_results(request.folder, text=False), select.wanted_values(request.filters))
    if request.by is not None:
        select.check_column(request.by)
    allowed = select.comma_list(request.allow or "")
    for name in allowed:
        select.check_column(name)
    column = metric_column(samples, request.metric)
    if column.endswith("_seconds"):
        raise UserError(f"{request.metric} of a run says little about speed: plot a trace (evictbench trace).")
    samples = samples[samples[column].notna()]
    if request.trainings:
        samples = as_one_row(samples)
        if not several(samples):
            raise UserError(
                "No policy and budget was run with several weights here: --trainings makes one row of runs that differ "
                "in a learned policy's weights alone (evictbench sweep --weights A,B,C)."
            )
    groups = list(samples.groupby(["suite", "model"], observed=True))
    names_taken: set[str] = set()
    refusal: UserError | None = None
    for (suite, model), group in groups:
        parts = select.by_protocol(group, allowed, request.by) if request.each_protocol else [("", group)]
        for protocol, part in parts:
            try:
                panels = _panels_of(part, request, ", ".join(filter(None, (suite, model, protocol))), allowed, warn)
                drawn = list(_group_drawings(request, names, suite, model, panels, protocol))
            except UserError as error:
                if not request.each_protocol or len(groups) * len(parts) == 1:
                    raise
                warn(f"{', '.join(filter(None, (suite, model, protocol)))} is not drawn: {error}")
                refusal = refusal or error
                continue
            for drawing in drawn:
                yield replace(drawing, name=_not_taken(drawing.name, names_taken))
    if refusal is not None and not names_taken:
        raise refusal


def _panels_of(
    samples: pd.DataFrame, request: PlotRequest, where: str, allowed: Sequence[str], warn: Callable[[str], None]
) -> dict[str, pd.DataFrame]:
    """The panels of a figure, each with the samples that may stand in it. where: what the samples have in common."""
    panels = {}
    for panel, part in _panels(samples, request.by):
        place = ", ".join(filter(None, (where, panel)))
        select.check_one_protocol(part, place, allowed)
        whole, left_out = select.common_tasks(part)
        whole = select.paired_documents(whole) if request.paired else whole
        for sentence in (*left_out, *select.uneven_tasks(whole)):
            warn(f"{place}: {sentence}")
        panels[panel] = whole
    return panels


def _not_taken(name: str, taken: set[str]) -> str:
    """A name for a figure's files that no other has, and that every disk takes."""
    short = name[:LONGEST_NAME]
    count = 1
    while (own := short if count == 1 else f"{short}-{count}") in taken:
        count += 1
    taken.add(own)
    return own


def _group_drawings(
    request: PlotRequest,
    names: Sequence[str] | None,
    suite: str,
    model: str,
    panels: Mapping[str, pd.DataFrame],
    protocol: str,
) -> Iterator[Drawing]:
    """The figures of a suite and model. protocol: what tells these runs from others of the same, in words."""
    import pandas as pd

    metric = request.metric
    there = _measured(panels)
    if names is None:
        names = [name for name in OF_RUNS if there.get(name, True)]
    for name in names:
        if name in LACKS and not there[name] and not (name == "recency" and have(panels, SHARE)):
            raise UserError(f"{suite} has {LACKS[name]}")
    title = f"{', '.join(filter(None, (f'{suite} on {model}', protocol)))}: {_title(panels.values(), request.by)}"
    title += f"\n{select.reading_of(pd.concat(panels.values()))}"
    trainings = _trainings(panels) if request.trainings else ""
    title += trainings

    def numbers(make: Callable[[data.Panels], pd.DataFrame], metric: str = "score") -> pd.DataFrame:
        return with_trainings(make, panels, metric) if trainings else make(panels)

    for name in names:
        file = "-".join(
            filter(
                None,
                (
                    name,
                    "" if metric == "score" or name not in ("budget", "bytes") else metric,
                    suite,
                    model,
                    protocol.replace(", ", "-"),
                    "" if request.by is None else f"by-{request.by}",
                ),
            )
        )
        file = re.sub(r"[^\w.+=-]", "_", file)
        if name == "errors":
            yield Drawing(file, title, numbers(data.error_modes), partial(figures.error_bars, title=title))
        elif name == "fidelity":
            yield Drawing(
                file,
                title,
                numbers(data.fidelity_points),
                partial(figures.against_budget, metric="", title=title),
            )
        elif name == "perplexity":
            yield Drawing(
                file, title, numbers(perplexity_points), partial(figures.against_budget, metric="", title=title)
            )
        elif name == "answers":
            yield Drawing(file, title, numbers(answer_points), partial(_draw_answers, title=title))
        elif name == "recency":
            yield Drawing(file, title, numbers(recency_points, SHARE), partial(recency_shares, title=title))
        else:
            points = numbers(partial(data.budget_points, metric=metric), metric)
            draw = figures.against_budget if name == "budget" else figures.against_bytes
            yield Drawing(file, title, points, partial(draw, metric=metric, title=title))


def _trainings(panels: Mapping[str, pd.DataFrame]) -> str:
    """The title's words about trainings: "; mean over 3 trainings, the units of their bars"; "" where there is one."""
    counts = {count for part in panels.values() for count in several(part).values()}
    if not counts:
        return ""
    words = str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"; mean of {words} trainings, which are the units of their bars"


def _measured(panels: Mapping[str, pd.DataFrame]) -> dict[str, bool]:
    """Whether the runs have what a figure shows, for each figure that not all runs have numbers for."""

    compared = have(panels, "metric_kl", "metric_ppl_ratio")
    return {
        "fidelity": compared,
        "errors": not compared,
        "perplexity": have(panels, *(f"metric_{name}" for name in NEEDS)),
        "answers": not compared and all(map(has_lost_answers, panels.values())),
        "recency": have(panels, SHARE) and all(part[WINDOW].nunique() == 1 for part in panels.values()),
    }


def have(panels: Mapping[str, pd.DataFrame], *columns: str) -> bool:
    """Whether samples of every panel have these columns."""
    return all(name in part and part[name].notna().any() for part in panels.values() for name in columns)


def _draw_answers(frame: pd.DataFrame, title: str) -> Figure:
    title = f"{title}\non the documents that the full cache gets right"
    return figures.against_budget(answer_panels(frame), metric="", title=title)


def _panels(samples: pd.DataFrame, by: str | None) -> Iterator[tuple[str, pd.DataFrame]]:
    """The name and samples of each panel. Samples without a budget go into every panel of budgets, prefill or chunk."""
    if by is None:
        yield "", samples
        return
    values = select.texts_of(samples[by])
    everywhere = samples["budget"].isna() if by in ("budget", "prefill", "chunk") else values != values
    distinct = [value for value in dict.fromkeys(values) if (~everywhere & (values == value)).any()]
    for value in sorted(
        distinct, key=lambda text: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]
    ):
        yield (
            f"{by} {value}" if by not in ("task", "suite", "model", "policy") else value,
            samples[(values == value) | everywhere],
        )


def _title(panels: Iterable[pd.DataFrame], by: str | None) -> str:
    """The tasks and their sizes: "mean of 2 tasks, 16 samples each", or "niah_single_1, 12 to 16 samples"."""
    import pandas as pd

    samples = pd.concat(
        [part[["policy", "budget", "task", "doc_id"]].drop_duplicates().astype(object) for part in panels]
    )
    tasks = sorted(samples["task"].unique())
    sizes = samples.fillna({"budget": ""}).drop_duplicates().groupby(["policy", "budget", "task"]).size()
    count = str(sizes.min()) if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    if len(tasks) == 1:
        return f"{tasks[0]}, {count} samples"
    return f"{'' if by == 'task' else 'mean of '}{len(tasks)} tasks, {count} samples each"
