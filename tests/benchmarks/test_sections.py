"""The file of results: sections are replaced where they stand, and others are left alone."""

import pytest

from benchmarks.sections import goal, replace_section, table


def test_sections_come_in_the_order_of_their_first_run(tmp_path):
    file = tmp_path / "new" / "RESULTS.md"
    replace_section(file, "Decode", "make one", "first")
    replace_section(file, "Decode: long", "make two", "second")
    before = file.read_text()
    replace_section(file, "Decode", "make one", "third")
    after = file.read_text()
    assert after == before.replace("first", "third")
    assert [line for line in after.splitlines() if line.startswith("## ")] == ["## Decode", "## Decode: long"]
    assert "`make one`" in after
    assert "torch" in after
    assert "transformers" in after


def test_writing_the_same_again_changes_nothing(tmp_path):
    file = tmp_path / "RESULTS.md"
    for heading in ("A", "B", "A", "B"):
        replace_section(file, heading, "make", table(["a", "b"], [["1", "2"]]))
    once = file.read_text()
    replace_section(file, "A", "make", table(["a", "b"], [["1", "2"]]))
    assert file.read_text() == once
    assert once.count("| 1 | 2 |") == 2


def test_a_section_cannot_hold_another(tmp_path):
    with pytest.raises(AssertionError):
        replace_section(tmp_path / "RESULTS.md", "A", "make", "text\n## B\n")


@pytest.mark.parametrize(
    ("value", "sign", "wanted", "said"),
    [
        (1.3, ">=", 1.3, ">= 1.3: met"),
        (0.9, ">=", 1.0, ">= 1: missed by 10.0%"),
        (0.3, "<=", 0.5, "<= 0.5: met"),
        (0.6, "<=", 0.5, "<= 0.5: missed by 20.0%"),
    ],
)
def test_goals(value, sign, wanted, said):
    assert goal(value, sign, wanted) == said
