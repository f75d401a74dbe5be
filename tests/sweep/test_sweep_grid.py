"""Which cells a sweep has, from words and from a file, and in which order."""

from pathlib import Path

import pytest

from evictbench.errors import UserError
from evictbench.sweep.grid import coarse_to_fine, grid_cells, parse_grid, read_sweep_file


def cells(**words):
    return grid_cells(parse_grid(words))


def named(found):
    return [(one.policy, one.budget, one.suite) for one in found]


def test_the_middle_comes_first_then_the_ends_then_the_gaps():
    assert coarse_to_fine(["512", "64", "128", "256", "1024"]) == ["256", "64", "1024", "128", "512"]
    assert coarse_to_fine(["25%", "512", "5%", "64"]) == ["5%", "64", "25%", "512"]
    assert coarse_to_fine(["64", "128"]) == ["128", "64"]
    assert coarse_to_fine(["7"]) == ["7"]
    many = [str(number) for number in range(1, 40)]
    assert sorted(coarse_to_fine(many), key=int) == many


def test_the_full_cache_comes_first_and_every_policy_before_the_next_budget():
    found = cells(policies="h2o,tova", budgets="16,32,64", suites="toy,ruler")
    assert named(found[:6]) == [
        ("full", None, "toy"),
        ("full", None, "ruler"),
        ("h2o", "32", "toy"),
        ("tova", "32", "toy"),
        ("h2o", "32", "ruler"),
        ("tova", "32", "ruler"),
    ]
    assert [one.budget for one in found[2:]] == ["32"] * 4 + ["16"] * 4 + ["64"] * 4
    assert len(found) == 14


def test_settings_stay_with_their_policies_and_doubles_count_once():
    found = cells(policies="full,snapkv:window=8,kernel=5,h2o,h2o", budgets="32,32.0%,32%", suites="toy")
    assert {one.policy for one in found} == {"full", "snapkv:window=8,kernel=5", "h2o"}
    assert [one.budget for one in found] == [None, "32%", "32%", "32", "32"]


def test_tasks_go_to_the_suites_that_have_them():
    found = cells(policies="h2o", budgets="32", suites="toy,ruler", tasks="vt,toy_recall,niah_single_1")
    assert {one.suite: one.tasks for one in found} == {"toy": "toy_recall", "ruler": "vt,niah_single_1"}
    with pytest.raises(UserError, match="None of --tasks vt is a task of toy"):
        cells(policies="h2o", budgets="32", suites="toy,ruler", tasks="vt")
    with pytest.raises(UserError, match="Unknown task 'toy_recal': did you mean toy_recall"):
        cells(policies="h2o", budgets="32", suites="toy,ruler", tasks="vt,toy_recal")


def test_weights_go_to_the_learned_policy():
    found = cells(policies="h2o,kvpop", budgets="32", suites="toy", weights="mine")
    assert {one.policy: one.weights for one in found} == {"full": None, "h2o": None, "kvpop": "mine"}
    with pytest.raises(UserError, match="kvpop and kvpop_mlp are learned: overrides in a file say"):
        cells(policies="kvpop,kvpop_mlp", budgets="32", suites="toy", weights="mine")
    with pytest.raises(UserError, match="none of the policies is learned"):
        cells(policies="h2o", budgets="32", suites="toy", weights="mine")


@pytest.fixture
def write(tmp_path):
    def write(text):
        file = tmp_path / "sweep.yaml"
        file.write_text(text)
        return file

    return write


FILE = """
policies: [h2o, "kvpop:label=max"]
budgets: [32, 25%, 64]
suites: toy
tasks: [toy_recall, toy_pairs]
limit: 3
chat: off
max-new-tokens: 64
temperature: 1
data_dir: somewhere
skip-overlong: true
overrides:
  - policy: kvpop
    weights: mine
  - {suite: toy, budgets: [32, 64], limit: 9, thinking: on}
  - {policies: [h2o], budget: 25%, leave_out: true}
"""


def test_a_file_holds_the_same_words_and_what_differs_in_some_cells(write):
    found = grid_cells(parse_grid(read_sweep_file(write(FILE))))
    by_cell = {(one.policy, one.budget): one for one in found}
    assert by_cell.keys() == {
        ("full", None),
        *(("h2o", budget) for budget in ("32", "64")),
        *(("kvpop:label=max", budget) for budget in ("32", "64", "25%")),
    }
    full, h2o, kvpop = by_cell["full", None], by_cell["h2o", "32"], by_cell["kvpop:label=max", "25%"]
    assert (full.tasks, full.limit, full.chat, full.max_new_tokens) == ("toy_recall,toy_pairs", 3, "off", "64")
    assert (full.temperature, full.data_dir, full.skip_overlong) == (1.0, Path("somewhere"), True)
    assert (h2o.limit, h2o.thinking, h2o.weights) == (9, "on", None)
    assert (kvpop.limit, kvpop.thinking, kvpop.weights) == (3, "auto", "mine")


def test_the_command_line_goes_before_the_file(write):
    words = read_sweep_file(write("policies: h2o\nbudgets: 32\nsuites: toy\nlimit: 3\n")) | {
        "budgets": "16",
        "limit": 5,
    }
    assert [(one.budget, one.limit) for one in grid_cells(parse_grid(words))] == [(None, 5), ("16", 5)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("policies: [h2o", "is not YAML"),
        ("- h2o", "holds no words of a sweep"),
        ("policy: h2o", "Unknown word 'policy' in .*: did you mean policies"),
        ("limit: many", "The word limit in .* takes a whole number, and not 'many'"),
        ("limit: true", "takes a whole number"),
        ("skip_overlong: 3", "takes true or false"),
        ("model: [a, b]", "The word model in .* takes one word"),
        ("overrides: h2o", "are a list"),
        ("overrides: [{policy: h2o}]", "changes nothing"),
        ("overrides: [{polcy: h2o, limit: 3}]", "did you mean policy"),
        ("limit: 3\npolicies: h2o\nlimit: 5", r"line 3: the key limit is given twice \(first in line 1\)\.$"),
        ("data-dir: a\ndata_dir: b", "The word data_dir in .* is given twice, once with - and once with _"),
        ("overrides: [{policy: h2o, limit: 3, limit: 5}]", "line 1: the key limit is given twice"),
        ("overrides: [{policy: h2o, policies: tova, limit: 5}]", "The word policy of an override .* is given twice"),
    ],
)
def test_what_a_file_cannot_say(write, text, sentence):
    with pytest.raises(UserError, match=sentence):
        read_sweep_file(write(text))


def test_what_no_sweep_can_be(write, tmp_path):
    with pytest.raises(UserError, match="There is no file"):
        read_sweep_file(tmp_path / "none.yaml")
    for words, sentence in (
        ({"budgets": "32", "suites": "toy"}, "A sweep needs policies"),
        ({"policies": "h2o", "budgets": "32"}, "A sweep needs suites"),
        ({"policies": "h2o", "suites": "toy"}, "h2o needs budgets"),
        ({"policies": "h3o", "budgets": "32", "suites": "toy"}, "Unknown policy 'h3o'"),
        ({"policies": "h2o", "budgets": "32,none", "suites": "toy"}, "The budget 'none' is not a number"),
    ):
        with pytest.raises(UserError, match=sentence):
            cells(**words)
    text = "policies: h2o\nbudgets: 32\nsuites: toy\noverrides: [{policy: tova, limit: 3}]"
    with pytest.raises(UserError, match="Override 1 names no cell"):
        grid_cells(parse_grid(read_sweep_file(write(text))))


def test_several_weights_are_cells_of_their_own_beside_one_full_cache():
    found = cells(policies="h2o,kvpop", budgets="32", suites="toy", weights="one, two,one")
    assert [(cell.policy, cell.weights) for cell in found] == [
        ("full", None),
        ("h2o", None),
        ("kvpop", "one"),
        ("kvpop", "two"),
    ]
    with pytest.raises(UserError, match="names no weights"):
        cells(policies="kvpop", budgets="32", suites="toy", weights=" , ")


def test_a_file_names_several_weights_as_a_list(write):
    text = "policies: [kvpop, dms]\nbudgets: [32]\nsuites: toy\noverrides:\n  - {policy: dms, weights: [a, b]}\n"
    found = grid_cells(parse_grid(read_sweep_file(write(text))))
    assert [(cell.policy, cell.weights) for cell in found[1:]] == [("kvpop", None), ("dms", "a"), ("dms", "b")]
