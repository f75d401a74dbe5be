"""Policies with so many settings that no figure has room for their names."""

import warnings

import matplotlib as mpl
import pandas as pd
import pytest
from plot_records import retention, right, steps, write_run, write_trace
from test_plot_figures import assert_nothing_touches

from evictbench.cli.plot import plot_and_show
from evictbench.plot.drawings import drawings
from evictbench.plot.labels import LONGEST, short_names
from evictbench.plot.request import PlotRequest
from evictbench.plot.style import SETTINGS

LONG = "h2o:" + ",".join(f"setting{number}=value{number}" for number in range(12))
ALIKE = [LONG.replace("value5", f"value{number}") for number in (50, 51, 52)]
UNLIKE = [LONG.replace("setting", f"{letter}setting") for letter in "abc"]
SHOWN = {
    "alike": (ALIKE, ["h2o:…,setting5=value50", "h2o:…,setting5=value51", "h2o:…,setting5=value52"]),
    "unlike": (UNLIKE, [f"h2o:{letter}setting0=value0,…ting11=value11" for letter in "abc"]),
}


@pytest.fixture(params=SHOWN)
def case(request):
    return SHOWN[request.param]


@pytest.mark.parametrize("by", [None, "policy"])
def test_names_too_long_for_a_figure_are_cut_and_stay_apart(tmp_path, capsys, case, by):
    names, shown = case
    for number, name in enumerate(names):
        for budget in ("64", "128"):
            samples = right(5 + number, 10, occupancy=float(budget))
            write_run(tmp_path / "runs", samples, policy=name, budget=budget)
    write_run(tmp_path / "runs", right(9, 10, occupancy=500.0), policy="full", budget=None)
    pictures = drawn_apart(PlotRequest(tmp_path / "runs", by=by, format="svg", out=tmp_path / "plots"))
    assert len(pictures) == (3 if by else 4)
    assert all(text in picture for picture in pictures for text in shown)
    assert not any(name in picture for picture in pictures for name in names)
    capsys.readouterr()
    plot_and_show(PlotRequest(tmp_path / "runs", figures="budget", format="csv"))
    numbers = capsys.readouterr().out
    assert all(name in numbers for name in names)


def test_names_too_long_for_a_figure_of_a_trace(tmp_path, case):
    names, shown = case
    known = steps()
    several = [
        known[known["policy"] == "h2o"].assign(policy=name, budget=budget, cell=f"{number} {budget}")
        for number, name in enumerate(names)
        for budget in ("64", "128")
    ]
    found = pd.concat([known[known["policy"] == "full"], *several])
    found["cell"] = pd.factorize(found["cell"])[0]
    folder = write_trace(tmp_path / "trace", found, retention(names))
    pictures = drawn_apart(PlotRequest(folder, format="svg", out=tmp_path / "plots"))
    assert len(pictures) == 4
    assert all(text in picture for picture in pictures for text in shown)
    assert not any(name in picture for picture in pictures for name in names)


def drawn_apart(request):
    """The figures as SVG, written without a warning: no text lies on another, and axes are an inch wide or more."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot_and_show(request) == 0
        with mpl.rc_context(SETTINGS):
            for drawing in drawings(request, None, pytest.fail):
                figure = drawing.figure()
                assert_nothing_touches(figure)
                for axes in figure.axes:
                    width = axes.get_position().width * figure.get_figwidth()
                    assert width > 1 or axes.get_label() == "<colorbar>"
    return [file.read_text() for file in request.out.glob("*.svg")]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["h2o", f"tova:{'x' * 40}"], [f"tova:{'x' * 16}…{'x' * 14}"]),
        (
            [f"h2o:{'a' * 40}{middle}{'b' * 40}" for middle in "xyz"],
            [f"h2o:{'a' * 17}…{'b' * 14}{number}" for number in ("", " (2)", " (3)")],
        ),
        ([f"{LONG},last=1", f"{LONG},last=1,b=2"], ["h2o:setting0=value0,s…value11,last=1"[:22], "h2o:…,b=2"]),
        ([f"{policy}:{'a' * 40},b=1" for policy in ("h2o", "tova")], ["h2o:aaaaa", "tova:aaaa"]),
    ],
)
def test_short_names(names, shown):
    found = short_names(names)
    assert set(found) == {name for name in names if len(name) > LONGEST}
    assert len({found.get(name, name) for name in names}) == len(names)
    assert all(short.startswith(start) for short, start in zip(sorted(found.values()), sorted(shown), strict=True))
    assert all(len(short) <= LONGEST + len(" (2)") for short in found.values())
