"""`evictbench gate RUNS --baseline OTHER --exact`: any change fails, up or down."""

import copy
import json

import pytest
from gate.gate_cases import fidelity_lines, right, write_run

TEXT = {"suite": "fidelity", "tasks": ("text",)}


def changed(lines, number, **changes):
    lines = copy.deepcopy(lines)
    lines[number] |= changes
    return lines


def of_metric(lines, number, **metrics):
    return changed(lines, number, metrics=lines[number]["metrics"] | metrics)


@pytest.fixture
def exact(gate, tmp_path):
    """The gate's exit code, and why each quantity fails, of these lines against others."""

    def call(here, there, **what):
        for side, lines in (("here", here), ("there", there)):
            write_run(tmp_path / side, lines, **what)
        code, out, err = gate(tmp_path / "here", "--baseline", tmp_path / "there", "--exact", "--json", "--quiet")
        assert err == ""
        return code, {one["quantity"]: one["why"] for one in json.loads(out)["findings"] if one["fails"]}

    return call


def test_the_same_passes(exact):
    assert exact(fidelity_lines(), fidelity_lines(), **TEXT) == (0, {})


def test_rounding_passes(exact):
    lines = of_metric(fidelity_lines(), 3, kl=0.01 + 1e-6)
    assert exact(lines, fidelity_lines(), **TEXT) == (0, {})


@pytest.mark.parametrize("kl", [0.0115, 0.0085])
def test_one_text_whose_kl_goes_up_or_down_fails(exact, kl):
    code, fails = exact(of_metric(fidelity_lines(), 3, kl=kl), fidelity_lines(), **TEXT)
    assert code == 1
    assert fails == {"kl": f"The KL of the whole text of document 3 of text differs by {kl - 0.01:+.2g} nats, and "
                     "0.001 are let pass."}  # fmt: skip


def test_a_stretch_of_a_text_fails_though_the_text_as_a_whole_does_not(exact):
    lines = changed(fidelity_lines(), 5, by_position={"kl": [0.0085, 0.0115], "agreement": [0.9, 0.9]})
    code, fails = exact(lines, fidelity_lines(), **TEXT)
    assert code == 1
    assert "stretch" in fails["kl"]
    assert "document 5 of text" in fails["kl"]


def test_other_greedy_tokens_in_a_text_fail(exact):
    code, fails = exact(changed(fidelity_lines(), 7, score=0.91), fidelity_lines(), **TEXT)
    assert code == 1
    assert fails.keys() == {"ids"}
    assert "19 of 20 samples" in fails["ids"]


@pytest.mark.parametrize(("unequal", "code"), [(2, 0), (3, 1)])
def test_token_ids_are_equal_in_98_of_100_answers(exact, unequal, code):
    lines = right(60, 100)
    for number in range(unequal):
        lines = changed(lines, number, tokens=[1, 2, 4])
    found, fails = exact(lines, right(60, 100))
    assert found == code
    assert list(fails) == (["ids"] if code else [])


def test_a_choice_that_scores_otherwise_is_another_answer(exact):
    """Where choices are scored, the tokens are those of the longest choice, whatever came out."""
    assert exact(right(57, 100), right(60, 100))[0] == 1


@pytest.mark.parametrize("occupancy", [64.01, 63.99])
def test_another_occupancy_fails(exact, occupancy):
    code, fails = exact(right(60, 100, occupancy=occupancy), right(60, 100, occupancy=64.0))
    assert code == 1
    assert fails.keys() == {"occupancy"}


def test_runs_that_are_not_float32_are_refused(gate, tmp_path):
    for side in ("here", "there"):
        write_run(tmp_path / side, right(6, 10), dtype="bfloat16")
    code, _, err = gate(tmp_path / "here", "--baseline", tmp_path / "there", "--exact")
    assert code == 2
    assert "h2o @ 64 on ruler was made in bfloat16" in err


def test_a_baseline_without_token_ids_is_refused(gate, tmp_path):
    write_run(tmp_path / "here", right(6, 10))
    write_run(
        tmp_path / "there",
        [{name: value for name, value in line.items() if name != "tokens"} for line in right(6, 10)],
    )
    code, _, err = gate(tmp_path / "here", "--baseline", tmp_path / "there", "--exact")
    assert code == 2
    assert "document 0 of niah has no token ids in the baseline" in err
