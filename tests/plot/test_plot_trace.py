"""Traces: their numbers against the steps, their lines against the numbers, their maps against the kept sets."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from plot_records import retention, steps, write_trace
from test_plot_figures import assert_nothing_touches, lines

from evictbench.errors import UserError
from evictbench.plot import trace_figures as figures
from evictbench.plot.drawings import drawings
from evictbench.plot.request import PlotRequest
from evictbench.plot.style import SETTINGS
from evictbench.plot.trace import kept_points, latency_points, memory_points, retention_map
from evictbench.store.select import Filters
from evictbench.store.trace_files import RETENTION, STEPS, STEPS_FILE, TRACE, arrow_schema, read_trace


@pytest.fixture(autouse=True)
def _settings():
    with mpl.rc_context(SETTINGS):
        yield


def test_a_trace_reads_back_with_its_documented_columns(tmp_path):
    folder = write_trace(tmp_path / "t", steps())
    about, found = read_trace(folder)
    assert about["model"] == "tiny"
    assert list(found) == [column.name for column in STEPS]
    schema = arrow_schema(RETENTION)
    assert str(schema.field("positions").type) == "list<item: int32>"
    assert all(field.metadata[b"meaning"] for field in schema)


def test_latency_is_the_median_of_each_context(tmp_path):
    found = steps(contexts=(256, 1024))
    points = latency_points(found)
    for context in (256, 1024):
        of = found[(found["policy"] == "full") & (found["context"] == context) & (found["phase"] == "decode")]
        row = points[(points["policy"] == "full") & (points["position"] == of["position"].mean())]
        assert row["value"].item() == of["ms"].median()
        assert row["low"].item() == of["ms"].quantile(0.25)
        assert row["attention_ms"].item() == of["attention_ms"].median()


def test_prefill_is_the_seconds_of_one_prompt_however_many_rows(tmp_path):
    found = steps(rows=(1, 4))
    points = latency_points(found)
    one = found[(found["policy"] == "full") & (found["rows"] == 1) & (found["phase"] == "prefill")]["ms"].sum() / 1000
    prefill = points[(points["panel"] == "prefill") & (points["policy"] == "full")]
    assert prefill["value"].tolist() == pytest.approx([one])
    assert set(points["panel"]) == {"decode, 1 row", "decode, 4 rows", "prefill"}


def test_memory_shows_the_full_cache_growing_and_the_other_flat():
    points = memory_points(steps())
    held = points[points["panel"] == "cache held"].set_index("policy").sort_values("position")["value"]
    assert held["full"].is_monotonic_increasing
    assert held["full"].nunique() > 10
    assert set(held["h2o"]) == {64000}


def test_lines_of_a_trace_are_the_numbers():
    found = steps(contexts=(256, 1024, 8192), rows=(1, 8), lost=[("full", 8192, 8)])
    for frame, draw in ((latency_points(found), figures.latency), (memory_points(found), figures.memory)):
        figure = draw(frame, "title")
        for axes in figure.axes:
            here = frame[(frame["panel"] == axes.get_title("left")) & ~frame["lost"]]
            assert len(here)
            for policy in ("full", "h2o"):
                want = here[here["policy"] == policy].sort_values("position")
                line = lines(axes)[policy]
                assert line.get_xdata().tolist() == want["position"].tolist()
                assert line.get_ydata().tolist() == want["value"].tolist()
            assert ("full: out of memory" in lines(axes)) == ("8 rows" in axes.get_title("left"))
        assert_nothing_touches(figure)


def test_one_prompt_length_is_shown_as_bars():
    frame = latency_points(steps())
    figure = figures.latency(frame, "title")
    bars = figure.axes[1].patches
    want = frame[frame["panel"] == "prefill"].set_index("policy")["value"]
    assert [bar.get_width() for bar in bars] == [want["full"], want["h2o"]]
    assert "256 tokens (s)" in figure.axes[1].get_xlabel()


def test_several_budgets_of_a_policy_are_lines_of_their_own():
    found = steps()
    other = found[found["policy"] == "h2o"].assign(budget="128", cell=2)
    frame = memory_points(pd.concat([found, other]))
    assert set(frame["line"]) == {"full", "h2o 64", "h2o 128"}


def test_the_retention_map_is_the_kept_sets():
    frame = retention_map(retention())
    width = frame["width"].iloc[0]
    assert width == 2
    time = frame[(frame["view"] == "over time") & (frame["policy"] == "recent")]
    at = time[time["seen"] == 32].set_index("position")["kept"]
    assert at[at.index < 16].eq(0).all()
    assert at[(at.index >= 16) & (at.index < 32)].eq(1).all()
    assert at[at.index >= 32].isna().all()
    heads = frame[(frame["view"] == "by layer and head") & (frame["policy"] == "first")]
    assert len(heads[["layer", "head"]].drop_duplicates()) == 4
    assert heads.loc[heads["position"] < 16, "kept"].eq(1).all()
    assert heads.loc[heads["position"] >= 16, "kept"].eq(0).all()
    figure = figures.retention(frame, "title")
    above, below = figure.axes[0], figure.axes[2]
    mesh = above.collections[0].get_array()
    want = frame[(frame["view"] == "over time") & (frame["policy"] == "first")].pivot(
        index="position", columns="seen", values="kept"
    )
    np.testing.assert_array_equal(np.ma.filled(mesh, np.nan).reshape(want.shape), want.to_numpy())
    assert np.ma.filled(below.collections[0].get_array(), np.nan).size == 4 * 32
    assert_nothing_touches(figure)


def test_a_position_in_a_partial_stretch_counts_over_what_is_there():
    found = retention(policies=("first",), size=5, length=100)
    looks = retention_map(found[found["seen"].isin([5, 100])])
    first = looks[(looks["view"] == "over time") & (looks["seen"] == 5)].set_index("position")["kept"]
    assert first.dropna().eq(1).all()  # three positions a stretch, of which the second has two by then
    assert first.dropna().index.tolist() == [0, 3]


def test_where_kept_tokens_lie_and_how_many_are_recent():
    frame = kept_points(retention())
    lie = frame[frame["panel"] == "where kept tokens lie"]
    assert lie.groupby("policy")["value"].sum().to_dict() == pytest.approx({"recent": 1, "first": 1})
    assert lie[(lie["policy"] == "recent") & (lie["position"] < 40)]["value"].eq(0).all()
    inside = frame[frame["panel"] == "inside a recency window"].set_index(["policy", "position"])["value"]
    assert inside["recent"].eq(1).all()
    assert inside["first"].to_dict() == {16: 1, 32: 0, 48: 0, 64: 0}
    figure = figures.kept(frame, "title")
    for axes in figure.axes:
        for policy, line in lines(axes).items():
            want = frame[(frame["panel"] == axes.get_title("left")) & (frame["policy"] == policy)]
            assert line.get_ydata().tolist() == want["value"].tolist()
    assert_nothing_touches(figure)


def test_what_is_no_whole_trace_is_a_sentence(tmp_path):
    folder = write_trace(tmp_path / "t", steps())
    with pytest.raises(UserError, match=r"has no .*retention\.parquet"):
        list(drawings(PlotRequest(folder), ["retention"], pytest.fail))
    with pytest.raises(UserError, match="--by and --task would do nothing"):
        list(drawings(PlotRequest(folder, by="task", filters=Filters(task="vt")), None, pytest.fail))
    with pytest.raises(UserError, match=r"Unknown policy 'h20' in this trace: did you mean h2o\?"):
        list(drawings(PlotRequest(folder, filters=Filters(policy="h20")), None, pytest.fail))
    whole = (folder / STEPS_FILE).read_bytes()
    (folder / STEPS_FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="half-written or damaged"):
        list(drawings(PlotRequest(folder), None, pytest.fail))
    (folder / STEPS_FILE).unlink()
    with pytest.raises(UserError, match="was not finished"):
        list(drawings(PlotRequest(folder), None, pytest.fail))
    (folder / TRACE).write_text("{")
    with pytest.raises(UserError, match="is not the record of a trace"):
        list(drawings(PlotRequest(folder), None, pytest.fail))
