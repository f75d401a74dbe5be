"""The reference goes on from what is published, and its page counts what every cell has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from studies.reference import POLICIES, begin_from_published, main, native_is_another
from studies.reference_page import MARKS, common, table, write_between_marks


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
    dense = {"full", "tova", "h2o", "snapkv", "distillcache"}
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


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="lacks the marks"):
        write_between_marks(page, "table")
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter")
    write_between_marks(page, "new")
    assert page.read_text() == f"before\n{MARKS[0]}\n\nnew\n{MARKS[1]}\nafter"
