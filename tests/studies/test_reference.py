"""The reference goes on from what is published, and its page counts what every cell has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plot.plot_records import sample, write_run

from studies.reference import POLICIES, begin_from_published, main, native_is_another
from studies.reference_page import MARKS, common, lines, summary, table, write_between_marks


def test_a_cell_goes_on_from_what_is_published_and_from_its_own_run_first(tmp_path: Path) -> None:
    out, published = tmp_path / "runs", tmp_path / "published"
    plan: Any = SimpleNamespace(folder=out / "ruler" / "cell", settings=SimpleNamespace(out=out))
    assert not begin_from_published(plan, published)
    (published / "ruler" / "cell").mkdir(parents=True)
    (published / "ruler" / "cell" / "samples.jsonl").write_text("{}\n")
    assert begin_from_published(plan, published)
    assert (plan.folder / "samples.jsonl").read_text() == "{}\n"
    (plan.folder / "samples.jsonl").write_text("{}\n{}\n")
    assert not begin_from_published(plan, published)
    assert (plan.folder / "samples.jsonl").read_text() == "{}\n{}\n"


def test_policies_that_are_defined_with_a_dense_prompt_have_no_native_cells() -> None:
    dense = {"full", "tova", "h2o", "snapkv", "snapkv:decode=reselect", "distillcache"}
    assert {name for name in POLICIES if not native_is_another(name)} == dense


def test_another_prefill_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prefill", "dense,sparse"]) == 2
    assert "--prefill is dense or native, or both, not 'sparse'." in capsys.readouterr().err


def test_only_documents_that_every_cell_has_are_counted_and_differences_are_paired() -> None:
    whole = {("a", 0): 1.0, ("a", 1): 1.0, ("a", 2): 0.0}
    cells = common({("h2o", "128"): {("a", 0): 0.0, ("a", 1): 1.0}, ("tova", "128"): whole})
    assert cells["tova", "128"] == {("a", 0): 1.0, ("a", 1): 1.0}
    rows = list(table(cells, {cell: {("a", 0): 128.0} for cell in cells}, "128", ["a"], 100.0, ".1f"))
    assert rows[2].startswith("| `h2o` | 128 | 50.0")
    assert rows[3].startswith("| `tova` | 128 | 100.0")
    assert "+50.0" in rows[3]


def test_a_budget_that_is_no_bound_has_the_largest_head_beside_the_mean() -> None:
    cells = {("h2o", "128"): {("a", 0): 0.0}, ("dms", "128"): {("a", 0): 1.0}}
    seen = {cell: {("a", 0): 75.2} for cell in cells}
    most = {cell: {("a", 0): 113.0} for cell in cells}
    rows = list(table(cells, seen, "128", ["a"], 100.0, ".1f", most))
    assert rows[2].startswith("| `h2o` | 75 | 0.0")
    assert rows[3].startswith("| `dms` | 75, a head at most 113 | 100.0")


def test_the_table_of_means_says_what_was_seen_where_a_budget_is_no_bound(tmp_path: Path) -> None:
    for budget in ("128", "256"):
        for policy in ("h2o", "dms"):
            scores = [
                sample(doc, 1.0, occupancy=int(budget) / 2, metrics={"score": 1.0, "kl": 0.5}) for doc in range(2)
            ]
            for suite in ("ruler", "fidelity"):
                write_run(tmp_path, scores, policy=policy, budget=budget, suite=suite)
    rows = {line.split("`")[1]: line for line in summary(tmp_path) if line.startswith("| `")}
    assert rows["h2o"] == "| `h2o` | 100.0 | 100.0 | 0.5000 | 0.5000 |"
    assert rows["dms"] == "| `dms` | 100.0 (saw 64) | 100.0 (saw 128) | 0.5000 (saw 64) | 0.5000 (saw 128) |"


def test_pages_say_how_prompts_were_read_and_what_was_seen_without_a_bound(tmp_path: Path) -> None:
    for suite, metrics in (("ruler", {}), ("fidelity", {"kl": 0.5})):
        for policy, budget, seen in (("h2o", "128", 128.0), ("snapkv", "128", 172.0), ("full", None, 500.0)):
            for own_budget in ("128", "256") if budget else (None,):
                scores = [sample(doc, 0.5, occupancy=seen, metrics={"score": 0.5, **metrics}) for doc in range(3)]
                write_run(tmp_path, scores, policy=policy, budget=own_budget, suite=suite)
    text = "\n".join(summary(tmp_path))
    assert text.startswith("ruler: prefill native, question unseen.\nfidelity: prefill native, question unseen.\n\n")
    assert "| `h2o` | 50.0 | 50.0 | 0.5000 | 0.5000 |" in text
    assert "| `snapkv` | 50.0 (saw 172) | 50.0 (saw 172) | 0.5000 (saw 172) | 0.5000 (saw 172) |" in text
    assert "**ruler, 128 entries**: score on 3 documents a task; prefill native, question unseen." in [*lines(tmp_path)]


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="lacks the marks"):
        write_between_marks(page, "table")
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter")
    write_between_marks(page, "new")
    assert page.read_text() == f"before\n{MARKS[0]}\n\nnew\n{MARKS[1]}\nafter"
