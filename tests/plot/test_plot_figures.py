"""What is drawn: line data read back from the figures, and texts that do not touch."""

import itertools

import matplotlib as mpl
import pytest
from plot_records import right, sample, write_grid, write_run

import evictbench
from evictbench.plot import figures
from evictbench.plot.data import budget_points, error_modes, fidelity_points
from evictbench.plot.drawings import drawings
from evictbench.plot.request import PlotRequest
from evictbench.plot.style import SETTINGS


@pytest.fixture(autouse=True)
def _settings():
    with mpl.rc_context(SETTINGS):
        yield


def lines(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def bars(axes):
    """Each interval that is drawn: x, low, high."""
    (*collections,) = (one for one in axes.collections if one.get_label() == "_interval")
    return sorted(
        (start[0], start[1], end[1])
        for one in collections
        for (start, end) in (path.vertices for path in one.get_paths())
    )


def texts(figure):
    """Every text that is seen, with its box."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    found = []
    for text in figure.findobj(mpl.text.Text):
        box = text.get_window_extent(renderer)
        hidden = not text.get_visible() or not text.get_text().strip()
        if not hidden and box.width and _is_drawn(figure, text):
            found.append((text.get_text(), box))
    return found


def _is_drawn(figure, text):
    """Tick labels beyond an axis' limits exist and are not drawn."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            every = [
                label
                for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
                for label in (tick.label1, tick.label2)
            ]
            if any(text is label for label in every):
                shown = {id(tick.label1) for tick in axis._update_ticks()}
                return id(text) in shown
    return True


def assert_nothing_touches(figure):
    found = texts(figure)
    assert len(found) > 4
    for (one, a), (other, b) in itertools.combinations(found, 2):
        apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, f"{one!r} touches {other!r}"


def test_budget_lines_are_the_numbers(tmp_path):
    write_grid(tmp_path)
    frame = budget_points({"": evictbench.results(tmp_path)})
    figure = figures.against_budget(frame, "score", "title")
    (axes,) = figure.axes
    found = lines(axes)
    assert set(found) == {"h2o", "tova", "random", "full"}
    for policy in ("h2o", "tova", "random"):
        want = frame[frame["policy"] == policy].sort_values("entries")
        assert found[policy].get_xdata().tolist() == want["entries"].tolist() == [64, 128]
        assert found[policy].get_ydata().tolist() == want["value"].tolist()
    budgeted = frame[frame["entries"].notna()]
    assert bars(axes) == sorted(zip(budgeted["entries"], budgeted["low"], budgeted["high"], strict=True))
    full = frame[frame["policy"] == "full"].iloc[0]
    assert set(found["full"].get_ydata()) == {full["value"]}
    (band,) = (patch for patch in axes.patches if patch.get_label() == "_band")
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((full["low"], full["high"]))
    assert found["random"].get_linestyle() == "--"  # what matplotlib calls any dashes
    assert found["h2o"].get_linestyle() == "-"
    assert axes.get_xscale() == "log"
    assert [label.get_text().strip() for label in axes.get_xticklabels()] == ["64", "128"]


def test_byte_lines_are_the_numbers(tmp_path):
    write_grid(tmp_path)
    frame = budget_points({"": evictbench.results(tmp_path)})
    (axes,) = figures.against_bytes(frame, "score", "title").axes
    found = lines(axes)
    assert set(found) == {"h2o", "tova", "random", "full"}
    for policy, line in found.items():
        want = frame[frame["policy"] == policy].sort_values("cache_bytes")
        assert line.get_xdata().tolist() == want["cache_bytes"].tolist()
        assert line.get_ydata().tolist() == want["value"].tolist()
    low, high = axes.get_xlim()
    assert low < frame["cache_bytes"].min()
    assert frame["cache_bytes"].max() < high


def test_fidelity_lines_are_the_numbers(tmp_path):
    for budget, scale in (("64", 0.5), ("25%", 0.1), ("256", 0.01)):
        samples = [sample(doc, 0.9, metrics={"kl": scale * (1 + doc / 10), "ppl_ratio": 1 + scale}) for doc in range(4)]
        write_run(tmp_path, samples, suite="fidelity", budget=budget)
    frame = fidelity_points({"": evictbench.results(tmp_path)})
    figure = figures.against_budget(frame, "", "title")
    for axes, panel in zip(figure.axes, ("KL", "perplexity ratio"), strict=True):
        want = frame[frame["panel"] == panel].sort_values("entries")
        assert axes.get_title("left") == panel
        assert lines(axes)["h2o"].get_ydata().tolist() == want["value"].tolist()
    assert figure.axes[0].get_yscale() == "log"
    assert "nats" in figure.axes[0].get_ylabel()


def test_error_bars_are_the_numbers(tmp_path):
    write_run(tmp_path, [sample(0, 0.0, repetition=True), sample(1, 0.0, truncated=True), *right(4, 6)[2:]])
    write_run(tmp_path, right(3, 6), policy="tova", budget="32")
    frame = error_modes({"": evictbench.results(tmp_path)})
    (axes,) = figures.error_bars(frame, "title").axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["tova 32", "h2o 64"]
    for container, (column, *_) in zip(axes.containers, figures.MODES, strict=True):
        for name, bar in zip(names, container, strict=True):
            assert bar.get_width() == frame.set_index("policy").loc[name.split()[0], column]
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == pytest.approx([1 - frame.set_index("policy").loc[name.split()[0], "score"] for name in names])
    assert len({bar[0].get_hatch() for bar in axes.containers}) == 3


def test_names_and_ticks_do_not_touch_where_twelve_lines_end_together(tmp_path):
    from evictbench.registry import POLICIES, names

    for policy in (*names(POLICIES), "kvpop:label=max,window=64", "of_another_package"):
        for budget in ("64", "66", "25%", "128", "4096"):
            budget = None if policy == "full" else budget
            entries = {"25%": 70.0, None: 5000.0}.get(budget) or float(budget)
            write_run(tmp_path, right(8, 9, occupancy=entries), policy=policy, budget=budget)
            if budget is None:
                break
    frame = budget_points({"": evictbench.results(tmp_path)})
    for figure in (
        figures.against_budget(frame, "score", "ruler on tiny: niah, 9 samples"),
        figures.against_bytes(frame, "score", "ruler on tiny: niah, 9 samples"),
        figures.error_bars(error_modes({"": evictbench.results(tmp_path)}), "ruler on tiny: niah, 9 samples"),
    ):
        assert_nothing_touches(figure)


def test_panels_have_a_legend_and_nothing_touches(tmp_path):
    for task in ("niah", "vt", "fwe", "qa"):
        write_grid(tmp_path / task, tasks=(task,))
    root = tmp_path / "all"
    for policy in ("h2o", "streaming_llm", "full"):
        samples = [line for task in ("niah", "vt", "fwe", "qa") for line in right(3, 5, task=task)]
        budget = None if policy == "full" else "64"
        write_run(root, samples, policy=policy, budget=budget, tasks=("niah", "vt", "fwe", "qa"))
    for drawing in drawings(PlotRequest(root, by="task"), None, pytest.fail):
        figure = drawing.draw(drawing.numbers)
        titles = [axes.get_title("left").partition(",")[0] for axes in figure.axes]
        assert list(dict.fromkeys(titles)) == ["fwe", "niah", "qa", "vt"]
        assert_nothing_touches(figure)


def test_every_axis_says_what_it_shows(tmp_path):
    write_grid(tmp_path)
    for drawing in drawings(PlotRequest(tmp_path), None, pytest.fail):
        for axes in drawing.draw(drawing.numbers).axes:
            assert axes.get_xlabel()
            assert axes.get_ylabel() or "errors" in drawing.name


def test_one_sample_and_one_budget_can_be_drawn(tmp_path):
    write_run(tmp_path, right(1, 1))
    for drawing in drawings(PlotRequest(tmp_path), None, pytest.fail):
        figure = drawing.draw(drawing.numbers)
        figure.canvas.draw()
        assert figure.axes
