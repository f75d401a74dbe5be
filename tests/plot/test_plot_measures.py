"""The figures of perplexity, of what the full cache gets right, and of recency, and several trainings as one row:
against the samples, by hand."""

import math

import pytest
from plot_records import right, sample, write_run
from plotting import drawn_figures

import evictbench
from evictbench.errors import UserError
from evictbench.plot.answers import answer_points
from evictbench.plot.perplexity import perplexity_points
from evictbench.plot.recency import recency_points
from evictbench.stats.intervals import spread_interval, wilson
from evictbench.stats.ratios import ratio_of_means


def read(root):
    return evictbench.results(root, text=False)


def compared(nll, full, tokens, **changes):
    metrics = {"score": 0.9, "kl": 0.1, "agreement": 0.9, "ppl_ratio": 1.1, "nll": nll, "nll_full": full}
    return {"metrics": metrics, "output_tokens": tokens, **changes}


def write_compared(root):
    write_run(
        root,
        [sample(0, 0.9, **compared(1.2, 1.0, 30)), sample(1, 0.9, **compared(3.0, 2.0, 10))],
        suite="fidelity",
    )


def test_perplexity_is_over_all_tokens_beside_the_full_caches(tmp_path):
    write_compared(tmp_path)
    drawn_figures(tmp_path, "perplexity")
    frame = perplexity_points({"": read(tmp_path)}).set_index("panel")
    ppl, full = math.exp((36 + 30) / 40), math.exp((30 + 20) / 40)
    assert frame.loc["perplexity", "value"] == pytest.approx(ppl)
    assert frame.loc["above the full cache", "value"] == pytest.approx(ppl - full)
    assert frame["full"].tolist() == pytest.approx([full, full])
    assert frame["tokens"].tolist() == [40, 40]
    assert frame["metric"].tolist() == ["ppl", "ppl_increase"]


FULL = [
    sample(0, 1.0, output_tokens=10),
    sample(1, 1.0, output_tokens=20),
    sample(2, 0.5, output_tokens=30),
    sample(3, 1.0, output_tokens=20),
    sample(4, 0.0, output_tokens=99),
]
EVICTED = [
    sample(0, 1.0, output_tokens=10),
    sample(1, 0.0, output_tokens=16, truncated=True, repetition=True),
    sample(2, 0.2, output_tokens=16, truncated=True),
    sample(3, 0.4, output_tokens=14),
    sample(4, 1.0, output_tokens=1),
]


def test_errors_and_lengths_are_of_what_the_full_cache_gets_right(tmp_path):
    write_run(tmp_path, FULL, policy="full", budget=None)
    write_run(tmp_path, EVICTED)
    frame = answer_points({"": read(tmp_path)}).set_index("policy")
    row = frame.loc["h2o"]
    assert (row["wrong"], row["repetition"], row["over_long"], row["incorrect"]) == (0.75, 0.25, 0.25, 0.25)
    assert (row["wrong_low"], row["wrong_high"]) == pytest.approx(wilson(3, 4))
    assert (row["cut_off"], row["tokens"], row["documents"]) == (0.5, 14.0, 4)
    ratio, interval = ratio_of_means([10, 16, 16, 14], [10, 20, 30, 20])
    assert row["length_ratio"] == pytest.approx(ratio) == pytest.approx(0.7)
    assert (row["length_ratio_low"], row["length_ratio_high"]) == pytest.approx(interval)
    assert frame.loc["full", ["wrong", "length_ratio", "tokens"]].tolist() == [0.0, 1.0, 20.0]


def test_repeats_are_averaged_before_documents_are(tmp_path):
    full = [sample(0, score, repeat=n) for n, score in enumerate((1.0, 1.0, 0.0, 0.0))]
    full += [sample(1, score, repeat=n) for n, score in enumerate((1.0, 0.0, 0.0, 0.0))]
    write_run(tmp_path, full, policy="full", budget=None)
    write_run(tmp_path, [sample(0, score, repeat=n) for n, score in enumerate((1.0, 1.0, 1.0, 0.0))])
    frame = answer_points({"": read(tmp_path)}).set_index("policy")
    assert frame["documents"].tolist() == [1, 1]
    assert (frame.loc["h2o", "wrong"], frame.loc["full", "wrong"]) == (0.25, 0.5)


def test_without_the_full_cache_nobody_knows_what_was_right(tmp_path):
    write_run(tmp_path, EVICTED)
    with pytest.raises(UserError, match="evictbench run --policy full"):
        answer_points({"": read(tmp_path)})
    write_run(tmp_path, [sample(0, 0.0)], policy="full", budget=None)
    with pytest.raises(UserError, match="no document right"):
        answer_points({"": read(tmp_path)})
    assert "answers" not in drawn_figures(tmp_path)
    write_run(tmp_path / "b", FULL, policy="full", budget=None)
    write_run(tmp_path / "b", EVICTED)
    assert "answers" in drawn_figures(tmp_path / "b")
    write_compared(tmp_path / "c")
    assert {"perplexity", "fidelity"} <= drawn_figures(tmp_path / "c").keys()
    with pytest.raises(UserError, match="evictbench run --recency"):
        drawn_figures(tmp_path / "b", "recency")
    with pytest.raises(UserError, match="no log-likelihoods"):
        drawn_figures(tmp_path / "b", "perplexity")


def recency(share, by_layer, window="same"):
    return {
        "recency": {"version": 1, "window": window, "every": 32, "moments": 2, "share": share, "by_layer": by_layer}
    }


def test_recency_against_budget_and_by_layer(tmp_path):
    write_run(tmp_path, [sample(0, 1.0, **recency(0.5, [0.4, 0.6])), sample(1, 1.0, **recency(0.7, [0.8, None]))])
    write_run(tmp_path, [sample(0, 1.0, **recency(0.9, [0.9, 0.9]))], budget="128")
    write_run(tmp_path, [sample(0, 1.0, **recency(1.0, [1.0, 1.0]))], policy="full", budget=None)
    frame = recency_points({"": read(tmp_path)})
    assert frame["panel"].unique().tolist() == ["against budget", "budget 64", "budget 128"]
    whole = frame[frame["panel"] == "against budget"].set_index("budget")
    assert whole["value"].to_dict() == pytest.approx({"64": 0.6, "128": 0.9})
    assert (whole.loc["64", "low"], whole.loc["64", "high"]) == pytest.approx(spread_interval([0.5, 0.7]))
    layers = frame[frame["panel"] == "budget 64"]
    assert layers["layer"].tolist() == [0, 1]
    assert layers["value"].tolist() == pytest.approx([0.6, 0.6])
    assert "full" not in set(frame["policy"])
    assert "recency" in drawn_figures(tmp_path)
    drawn_figures(tmp_path, "recency")
    write_run(tmp_path, [sample(0, 1.0, **recency(0.2, [0.2, 0.2], "96"))], policy="tova")
    with pytest.raises(UserError, match="two windows, 96 and same"):
        recency_points({"": read(tmp_path)})


def write_trainings(root):
    """Three trainings of a policy, of 4, 6 and 8 right in ten, beside one that is not trained."""
    write_run(root, right(9, 10), policy="full", budget=None)
    write_run(root, right(5, 10))
    for mark, count in (("a", 4), ("b", 6), ("c", 8)):
        weights = {"sha256": mark, "variant": ""}
        write_run(root, right(count, 10), policy="kvpop", policy_weights=weights)


def test_trainings_are_one_row_where_it_is_asked_for(tmp_path):
    write_trainings(tmp_path)
    rows = drawn_figures(tmp_path, trainings=True)["budget"].numbers.set_index("policy")
    assert rows.loc["kvpop", "value"] == pytest.approx(0.6)
    assert rows.loc["kvpop", "sd"] == pytest.approx(0.2)
    low, high = spread_interval([0.4, 0.6, 0.8])
    assert (rows.loc["kvpop", "low"], rows.loc["kvpop", "high"]) == pytest.approx((low, min(1.0, high)))
    assert rows["trainings"].fillna(0).to_dict() == {"kvpop": 3, "h2o": 0, "full": 0}
    alone = drawn_figures(tmp_path, "budget", where=("policy_name=h2o",))["budget"].numbers
    assert rows.loc["h2o", ["value", "low", "high"]].tolist() == alone.iloc[0][["value", "low", "high"]].tolist()
    answers = drawn_figures(tmp_path, "answers", trainings=True)["answers"].numbers.set_index("policy")
    wrong = [5 / 9, 3 / 9, 1 / 9]
    assert answers.loc["kvpop", "wrong"] == pytest.approx(sum(wrong) / 3)
    assert answers.loc["kvpop", "wrong_sd"] == pytest.approx(2 / 9)
    errors = drawn_figures(tmp_path, "errors", trainings=True)["errors"].numbers.set_index("policy")
    assert errors.loc["kvpop", "score_sd"] == pytest.approx(0.2)


def test_trainings_are_not_mixed_unasked_nor_with_other_settings(tmp_path):
    write_trainings(tmp_path)
    with pytest.raises(UserError, match="stands for two things"):
        drawn_figures(tmp_path, each_protocol=False)
    write_run(tmp_path, right(1, 10), policy="kvpop", policy_weights={"sha256": "d", "transferred_from": "other"})
    with pytest.raises(UserError, match="stands for two things"):
        drawn_figures(tmp_path, each_protocol=False, trainings=True)


def test_one_training_is_no_row_of_several(tmp_path):
    write_run(tmp_path, right(4, 10), policy="kvpop", policy_weights={"sha256": "a"})
    with pytest.raises(UserError, match="sweep --weights A,B,C"):
        drawn_figures(tmp_path, trainings=True)
