"""Colours that stay apart for every eye, markers and lines for grey print, names that do not touch."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evictbench import registry
from evictbench.plot.labels import move_apart
from evictbench.plot.style import in_order, plot_styles
from evictbench.store.select import budget_bounds

OURS = [
    name
    for name in registry.names(registry.POLICIES)
    if registry._entries(registry.POLICIES)[name].value.startswith("evictbench.policies.")
]
KNOWN = {name: registry.load_policy(name).plot_style for name in in_order(OURS)}

# Machado, Oliveira and Fernandes 2009, severity 1.0.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def linear(colour):
    values = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(values):
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(values, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_are_far_apart_under_every_sight(sight):
    colours = {
        name: style.colour for name, style in KNOWN.items() if name != "oracle"
    }  # a dashed line, as black as full
    seen = {name: lab(np.asarray(SIGHT[sight]) @ linear(colour)) for name, colour in colours.items()}
    closest = min(np.linalg.norm(seen[a] - seen[b]) for a, b in itertools.combinations(seen, 2))
    assert closest >= 26


def test_colours_stand_out_from_white():
    for style in KNOWN.values():
        assert 1.05 / (linear(style.colour) @ [0.2126, 0.7152, 0.0722] + 0.05) >= 2.6


def test_grey_print_tells_policies_apart():
    assert len({style.marker for style in KNOWN.values()}) == len(KNOWN)
    assert all(KNOWN[name].line != "-" for name in ("oracle", "random"))


def test_every_policy_that_comes_with_the_package_has_a_look_of_its_own():
    own = {name: vars(registry.load_policy(name)).get("plot_style") for name in OURS}
    assert None not in own.values()
    assert plot_styles(OURS) == own
    assert list(KNOWN) == [
        *("full", "oracle", "random", "streaming_llm", "tova", "h2o", "snapkv"),
        *("dms", "kvpop", "kvpop_mlp", "indexmem_pp", "distillcache"),
    ]


def test_policies_with_one_look_and_policies_without_any_differ_in_one_figure(monkeypatch):
    """A package may copy a style, inherit it with the class, or declare none; a label runs no file."""
    h2o = registry.load_policy("h2o")
    copied = type("Copied", (h2o,), {"name": "a_copy", "plot_style": h2o.plot_style})
    inherited = type("Inherited", (h2o,), {"name": "an_heir"})
    load = {"a_copy": copied, "an_heir": inherited}
    monkeypatch.setattr("evictbench.plot.style.load_policy", lambda name: load.get(name) or registry.load_policy(name))
    names = ["h2o", "a_copy", "an_heir", "mine", "yours", "file.py:Mine"]
    drawn = plot_styles(names)
    assert drawn["h2o"] == KNOWN["h2o"] or drawn["a_copy"] == KNOWN["h2o"]
    assert len({(style.colour, style.marker) for style in drawn.values()}) == len(names)
    assert drawn == plot_styles(names[::-1])


def test_more_policies_than_colours_and_markers_differ_in_their_lines():
    drawn = plot_styles([f"policy_{number}" for number in range(150)])
    assert len({(style.colour, style.marker, style.line) for style in drawn.values()}) == 150


def test_a_label_imports_no_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('imported')")
    label = f"{file}:Mine"
    assert plot_styles([label])[label].marker
    assert budget_bounds([label]) == {label: True}


def test_known_policies_look_the_same_in_any_company():
    assert plot_styles(["h2o"])["h2o"] == plot_styles(["tova", "h2o", "mine", "full"])["h2o"] == KNOWN["h2o"]


def test_an_unknown_policy_keeps_its_style_and_is_like_no_other():
    alone = plot_styles(["mine"])["mine"]
    assert plot_styles(["h2o", "mine", "tova"])["mine"] == alone
    many = plot_styles([f"policy_{number}" for number in range(20)])
    assert len({(style.colour, style.marker) for style in many.values()}) == 20


def test_settings_of_one_policy_share_its_colour_and_differ_in_line_and_marker():
    found = plot_styles(["kvpop", "kvpop:label=max", "kvpop:label=mean,window=8"])
    assert {style.colour for style in found.values()} == {KNOWN["kvpop"].colour}
    assert len({(style.line, style.hollow) for style in found.values()}) == 3
    assert found["kvpop"] == KNOWN["kvpop"]


def test_legends_name_policies_in_one_order():
    assert in_order(["zzz", "tova", "h2o:group=max", "full", "h2o"]) == ["full", "tova", "h2o", "h2o:group=max", "zzz"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=15))
def test_labels_are_apart_in_order_and_inside(wanted):
    gap = 0.06
    places = move_apart(wanted, gap)
    for a, b in itertools.pairwise(sorted(range(len(wanted)), key=lambda i: places[i])):
        assert places[b] - places[a] >= gap - 1e-9
        assert wanted[a] <= wanted[b]
    assert max(places) <= 1 + 1e-9
    assert min(places) >= -1e-9


def test_labels_that_do_not_touch_stay_where_they_are():
    assert move_apart([0.9, 0.1, 0.5], 0.1) == pytest.approx([0.9, 0.1, 0.5])
    assert move_apart([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
