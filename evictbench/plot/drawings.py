"""The figures of a folder of runs or of a trace, with their numbers, ready to be drawn."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.plot import data, figures, trace
from evictbench.plot.request import OF_RUNS, Drawing, PlotRequest
from evictbench.store import select
from evictbench.store.frame import metric_column, read_results
from evictbench.store.trace_files import is_trace

if TYPE_CHECKING:
    import pandas as pd


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
    groups = samples.groupby(["suite", "model"], observed=True)
    for (suite, model), group in groups:
        panels = {}
        for panel, part in _panels(group, request.by):
            where = ", ".join(filter(None, (suite, model, panel)))
            select.check_one_protocol(part, where, allowed)
            whole, left_out = select.common_tasks(part)
            whole = select.paired_documents(whole) if request.paired else whole
            for sentence in (*left_out, *select.uneven_tasks(whole)):
                warn(f"{where}: {sentence}")
            panels[panel] = whole
        yield from _group_drawings(request, names, suite, model, panels)


def _group_drawings(
    request: PlotRequest, names: Sequence[str] | None, suite: str, model: str, panels: Mapping[str, pd.DataFrame]
) -> Iterator[Drawing]:
    metric = request.metric
    compared = all(
        f"metric_{name}" in part and part[f"metric_{name}"].notna().any()
        for part in panels.values()
        for name in ("kl", "ppl_ratio")
    )
    if names is None:
        names = [name for name in OF_RUNS if compared or name != "fidelity"]
        names = [name for name in names if not (compared and name == "errors")]
    elif "fidelity" in names and not compared:
        raise UserError(f"{suite} has no KL and no perplexity: --figures fidelity takes runs of the suite fidelity.")
    title = f"{suite} on {model}: {_title(panels.values(), request.by)}"
    for name in names:
        file = "-".join(
            filter(
                None,
                (
                    name,
                    "" if metric == "score" or name in ("errors", "fidelity") else metric,
                    suite,
                    model,
                    "" if request.by is None else f"by-{request.by}",
                ),
            )
        )
        file = re.sub(r"[^\w.+=-]", "_", file)
        if name == "errors":
            yield Drawing(file, title, data.error_modes(panels), partial(figures.error_bars, title=title))
        elif name == "fidelity":
            yield Drawing(
                file,
                title,
                data.fidelity_points(panels),
                partial(figures.against_budget, metric="", title=title),
            )
        else:
            points = data.budget_points(panels, metric)
            draw = figures.against_budget if name == "budget" else figures.against_bytes
            yield Drawing(file, title, points, partial(draw, metric=metric, title=title))


def _panels(samples: pd.DataFrame, by: str | None) -> Iterator[tuple[str, pd.DataFrame]]:
    """The name and samples of each panel. Samples without a budget go into every panel of budgets, prefill or chunk."""
    if by is None:
        yield "", samples
        return
    values = select.texts_of(samples[by])
    everywhere = samples["budget"].isna() if by in ("budget", "prefill", "chunk") else values != values
    distinct = [value for value in dict.fromkeys(values) if (~everywhere & (values == value)).any()]
    for value in sorted(
        distinct, key=lambda text: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]
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
