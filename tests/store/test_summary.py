"""From sample lines to rows: means, shares, rates, loops."""

import io
import itertools
import math

import pytest
from rich.console import Console

from evictbench.cli import run
from evictbench.stats.intervals import mean_interval, spread_interval
from evictbench.store.summary import MEANS, repeats_itself, summarise, tokens_per_second

NUMBERS = itertools.count()


def line(task, score, **more):
    """A sample of a document of its own, unless `more` says which."""
    known = (
        {"doc_id": next(NUMBERS), "repeat": 0}
        | dict.fromkeys(MEANS, 1.0)
        | {"occupancy_max": 8, "truncated": False, "repetition": False}
    )
    return known | {"task": task, "score": score, "decode_steps": 10, "decode_seconds": 2.0} | more


def test_the_mean_weighs_tasks_alike():
    lines = [line("a", 1.0), line("a", 1.0), line("a", 0.0), line("b", 0.5)]
    summary = summarise(lines, {"a": 3, "b": 3})
    assert summary["tasks"]["a"]["score"] == pytest.approx(2 / 3)
    assert summary["mean"]["score"] == pytest.approx((2 / 3 + 0.5) / 2)
    assert summary["mean"]["interval"] is None  # b has one sample
    assert (summary["tasks"]["b"]["samples"], summary["tasks"]["b"]["asked"]) == (1, 3)


def test_what_is_asked_for_is_never_less_than_what_is_there():
    summary = summarise([line("a", 1.0), line("a", 1.0)], {"a": 1, "b": 5})
    assert summary["tasks"]["a"]["asked"] == 2
    assert summary["mean"]["asked"] == 7


def test_the_maximum_is_the_maximum_and_shares_are_shares():
    lines = [line("a", 1, occupancy_max=9), line("a", 1, truncated=True), line("b", 0, occupancy_max=7), line("b", 0)]
    summary = summarise(lines, {"a": 2, "b": 2})
    assert [row["occupancy_max"] for row in summary["tasks"].values()] == [9, 8]
    assert summary["mean"]["occupancy_max"] == 9
    assert summary["tasks"]["a"]["truncated"] == 0.5
    assert summary["mean"]["truncated"] == 0.25


def test_tokens_per_second_is_all_steps_over_all_seconds():
    assert tokens_per_second([line("a", 1), line("a", 1, decode_steps=50, decode_seconds=3.0)]) == 12.0
    assert tokens_per_second([]) is None


def test_no_samples_is_no_table():
    assert summarise([], {"a": 3}) == {"tasks": {}, "mean": None}


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([7] * 32, True),
        ([7] * 31, False),
        ([1, 2, 3] + [4, 5] * 16, True),
        (list(range(64)), False),
        ([9, 8, *list(range(20)) * 4], True),
        ([9, 8, *list(range(20)) * 3], False),
        ([7] * 32 + [1], False),
        ([], False),
    ],
)
def test_a_loop_at_the_end_is_seen(tokens, loops):
    assert repeats_itself(tokens) is loops


def repeated(task, scores, answers=None, first=0):
    """Lines of several documents: one row of scores each."""
    return [
        line(task, score, doc_id=doc_id, repeat=repeat, answer=answers[doc_id][repeat] if answers else None)
        for doc_id, row in enumerate(scores, start=first)
        for repeat, score in enumerate(row)
    ]


def test_c7_documents_weigh_alike_however_many_answers_they_have_so_far():
    lines = repeated("a", [[1.0, 1.0, 1.0, 1.0], [0.0]])
    row = summarise(lines, {"a": 8})["tasks"]["a"]
    assert row["score"] == 0.5
    assert (row["samples"], row["asked"], row["documents"], row["repeats"], row["k"]) == (5, 8, 2, 1, 1)
    assert row["pass_at_k"] == 0.5
    assert summarise(lines, {"a": 8}, at=3)["tasks"]["a"]["pass_at_k"] == 1.0  # of the one that has three


def test_the_interval_is_over_documents():
    scores = [[1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]
    row = summarise(repeated("a", scores), {"a": 12})["tasks"]["a"]
    assert row["interval"] == mean_interval([0.75, 0.25, 0.5])
    assert row["pass_interval"] == mean_interval([1.0, 1.0, 1.0])


def test_the_majority_is_of_the_first_k_and_only_where_there_are_answers():
    lines = repeated("a", [[0.0, 0.0, 1.0, 1.0, 1.0]], [["5", "5", "7", "7", "7"]])
    assert summarise(lines, {"a": 5})["tasks"]["a"]["maj_at_k"] == 1.0
    assert summarise(lines, {"a": 5}, at=3)["tasks"]["a"]["maj_at_k"] == 0.0
    reversed_on_disk = summarise(lines[::-1], {"a": 5}, at=3)
    assert reversed_on_disk["tasks"]["a"]["maj_at_k"] == 0.0
    silent = repeated("a", [[0.0, 1.0]])
    assert summarise(silent, {"a": 2})["tasks"]["a"]["maj_at_k"] is None
    both = summarise(lines + repeated("b", [[0.0] * 5]), {"a": 5, "b": 5})
    assert both["mean"]["maj_at_k"] is None
    assert both["mean"]["pass_at_k"] == 0.5


def test_one_answer_each_has_no_k():
    row = summarise([line("a", 1.0), line("a", 0.0)], {"a": 2})["tasks"]["a"]
    assert (row["repeats"], row["k"], row["pass_at_k"], row["maj_at_k"]) == (1, None, None, None)


def test_metrics_beside_the_score_have_means_and_intervals():
    lines = [line("a", 1.0, metrics={"score": 1.0, "kl": 3.0}), line("a", 0.0, metrics={"score": 0.0, "kl": 5.0})]
    metric = summarise(lines, {"a": 2})["tasks"]["a"]["metrics"]["kl"]
    assert metric == {"mean": 4.0, "interval": spread_interval([3.0, 5.0])}
    assert metric["interval"][1] > 5
    lines = [line("a", 1.0, metrics={"strict": 0.0}) for _ in range(9)]
    assert summarise(lines, {"a": 9})["tasks"]["a"]["metrics"]["strict"]["interval"] == mean_interval([0.0] * 9)


def shown(width, lines=None, **more):
    lines = lines or [line("niah_multiquery", 1.0, decode_seconds=1e3), line("niah_multiquery", 0.25), line("vt", 0.5)]
    asked = dict.fromkeys((one["task"] for one in lines), 0) | ({} if len(lines) > 3 else {"vt": 2})
    summary = summarise(lines, asked) | more
    console = Console(file=io.StringIO(), width=width)
    console.print(*run.result_tables(summary, console))
    return console.file.getvalue()


def test_a_table_says_how_prompts_were_read():
    protocol = {"prefill": "bounded", "question": "unseen"}
    assert shown(160, identity={"budget": "64", "protocol": protocol}).startswith("prefill bounded, question unseen")
    assert shown(160, identity={"budget": None, "protocol": protocol}).startswith("no prompt is cut, question unseen")


def test_a_wide_console_gets_one_table_and_a_narrow_one_two():
    assert shown(160).count("niah_multiquery") == 1
    assert shown(80).count("niah_multiquery") == 2


def test_a_table_says_that_the_policy_has_another_models_weights():
    sentence = "The policy's weights were trained on SmolLM2-135M."
    assert " ".join(shown(80, transferred_from="SmolLM2-135M").split()).count(sentence) == 1
    assert "trained on" not in shown(80, transferred_from=None)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_number_is_cut_off_at_any_usual_width(width):
    text = shown(width)
    assert "…" not in text
    for said in ("62.5", "50.0", "1/2", "-", "0%"):
        assert said in text


@pytest.mark.parametrize(
    ("width", "name"),
    [(100, "passage_retrieval_en_e"), (160, "bbh_tracking_shuffled_objects_seven_objects")],
)
def test_repeats_fit_a_usual_width(width, name):
    answers = [["a", "b"] * 8] * 2
    lines = repeated(name, [[1.0, 0.0] * 8, [0.0, 1.0] * 8], answers) + repeated("aime24", [[1.0] * 16] * 2, answers)
    text = shown(width, lines)
    assert "…" not in text
    for said in ("avg@16", "pass@16", "maj@16", "2 x 16", "50.0", name, "loop"):
        assert said in text, said
    assert max(map(len, text.splitlines())) <= width


def test_names_fold_before_numbers_do():
    text = shown(80, [line("bbh_tracking_shuffled_objects_seven_objects_direct", 0.625) for _ in range(4)])
    assert "…" not in text
    for said in ("62.5", "tok/s", "prefill", "loop"):
        assert said in text
    column = "".join(row.split()[0] for row in text.splitlines() if (row.strip() and "bbh" in row) or "_" in row)
    assert column == "bbh_tracking_shuffled_objects_seven_objects_direct" * 2


def test_metrics_beside_the_score_have_a_table_of_their_own():
    lines = [
        line("text", 0.9, metrics={"score": 0.9, "kl": kl, "ppl_ratio": 1.25}) for kl in (0.011, 0.012, 0.013, 0.04)
    ]
    text = shown(100, lines)
    assert "kl" in text
    assert "0.019 (" in text
    assert "1.25 (1.25 to 1.25)" in text
    many = {f"metric{i}": 1.0 for i in range(9)}
    text = shown(100, [line("text", 0.9, metrics=many) for _ in range(4)])
    assert "metric2" in text
    assert "metric3" not in text


def test_perplexity_is_over_the_tokens_of_all_documents():
    def text(task, nll, full, tokens):
        return line(task, 0.9, metrics={"score": 0.9, "nll": nll, "nll_full": full}, output_tokens=tokens)

    lines = [text("a", 1.0, 0.5, 30), text("a", 3.0, 2.5, 10), text("b", 2.0, 2.0, 60)]
    summary = summarise(lines, {"a": 2, "b": 1})
    assert summary["tasks"]["a"]["perplexity"]["value"] == pytest.approx(math.exp(1.5))
    assert summary["tasks"]["a"]["perplexity"]["full"] == pytest.approx(math.exp(1.0))
    assert summary["mean"]["perplexity"]["value"] == pytest.approx(math.exp((30 + 30 + 120) / 100))
    low, high = summary["mean"]["perplexity"]["interval"]
    assert low < math.exp(1.8) < high
    assert "4.482 (full 2.718)" in shown(100, [*lines, text("b", 1.0, 1.0, 5)])
    assert summarise([line("a", 1.0, metrics={"score": 1.0})], {"a": 1})["mean"]["perplexity"] is None
