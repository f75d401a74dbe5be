"""The metrics against values computed by hand, through the graders that the task files name."""

from __future__ import annotations

import sys

import pytest

from evictbench.suites.longbench import grade, metrics

CLASSES = ["Food", "Date", "location", "Other location", "number", "Other", "Other number"]

# (grader, references, response, expected)
ROWS = [
    # word F1: 2 x common / (words of both), without case, punctuation and articles
    ("f1", ["Bob Dylan"], "Bob Dylan", 1.0),
    ("f1", ["Bob Dylan"], " The bob, dylan!\n", 1.0),
    ("f1", ["Bob Dylan"], "It was Bob Dylan", 2 * 2 / (4 + 2)),
    ("f1", ["5 percent points.", "0.05 F1"], "about 5 percent", 2 * 2 / (3 + 3)),
    ("f1", ["no"], "yes", 0.0),
    ("f1", ["no"], "", 0.0),
    ("f1", ["The A-team"], "ateam", 1.0),
    ("f1", ["one two two"], "two two two", 2 * 2 / (3 + 3)),
    ("f1", ["UT", "University of Toronto"], "university of toronto", 1.0),
    ("f1", ["Dylan"], "<think>Dylan</think>", 0.0),
    # the first line that is not empty
    ("first_line_f1", ["Paris"], "\n\nParis\nQuestion: where is Rome?", 1.0),
    ("first_line_f1", ["Paris"], " \nParis", 0.0),
    ("first_line_f1", ["Paris"], "Rome\nParis", 0.0),
    # Chinese: jieba cuts 我/爱/北京/天安门
    ("f1_zh", ["我爱北京天安门"], "我爱北京", 2 * 3 / (3 + 4)),
    ("f1_zh", ["我爱北京天安门"], "我 爱，北京。天安门！", 1.0),
    ("f1_zh", ["天安门"], "北京", 0.0),
    ("rouge_l_zh", ["我爱北京天安门"], "我爱北京", 2 * 1 * 0.75 / 1.75),
    ("rouge_l_zh", ["我爱北京天安门"], "", 0.0),
    # ROUGE-L over sets of words: {the, cat, on, mat} of {the, cat, sat | lay, on, mat}
    ("rouge_l", ["the cat lay on the mat"], "the cat sat on the mat", 0.8),
    ("rouge_l", ["a b. c d"], "a b", 2 * 1 * 0.5 / 1.5),
    ("rouge_l", ["a b. c d"], "c d. a b", 1.0),
    ("rouge_l", ["a b c d"], "d c b a", 0.25),
    ("rouge_l", ["a b"], "A B", 0.0),
    ("rouge_l", ["a b", "x y"], "x y", 1.0),
    ("rouge_l", ["a b"], "...", 0.0),
    ("rouge_l", ["a b"], "", 0.0),
    ("first_line_rouge_l", ["Ann will call."], "\nAnn will call.\nDialogue: more", 1.0),
    # 1 / the classes named, if the right one is among them
    ("classification", ["Date"], "Date\nQuestion: Food?", 1.0),
    ("classification", ["Date"], "\nDate or Food", 1 / 2),
    ("classification", ["Other location"], "Other location", 1.0),
    ("classification", ["Other number"], "Other number", 1.0),  # two neighbours in the list are parts of it
    ("classification", ["location"], "Other location", 1 / 3),
    ("classification", ["Date"], "date", 0.0),
    ("classification", ["Food"], "", 0.0),
    # the fraction of the numbers that are right
    ("retrieval", ["Paragraph 19"], "Paragraph 19", 1.0),
    ("retrieval", ["Paragraph 1"], "Paragraph 19", 0.0),
    ("retrieval", ["Paragraph 3"], "3, or 4", 1 / 2),
    ("retrieval", ["段落3"], "段落3", 1.0),
    ("retrieval", ["Paragraph 3"], "the third", 0.0),
    ("count", ["46"], "46.", 1.0),
    ("count", ["4"], "4 of 46 and 4", 2 / 3),
    ("count", ["4"], "none", 0.0),
    # 1 - insertions and deletions / letters of both, in hundredths, of the first line of code
    ("code", ["    return x"], "    return x\n    pass", 1.0),
    ("code", ["return x"], "    return x", round(16 / 20, 2)),
    ("code", ["abc"], "abd", round(4 / 6, 2)),
    ("code", ["aaaaab"], "ababab", round(8 / 12, 2)),
    ("code", ["x = 1"], "\n\n# set x\n```python\nx = 1", 1.0),
    ("code", ["x = 1"], "// x\n\nx = 1", 0.0),
    ("code", ["x = 1"], "", 0.0),
]


@pytest.mark.parametrize(("grader", "references", "response", "expected"), ROWS)
def test_scores(grader, references, response, expected):
    doc = {"answers": references, "all_classes": CLASSES, "cut": False, "words": 10}
    found = getattr(grade, grader)(doc, [response])
    assert found["score"] == pytest.approx(expected, abs=1e-6)
    assert 0 <= found["score"] <= 1


def test_every_grader_has_rows():
    graders = {name for name, value in vars(grade).items() if callable(value) and value.__module__ == grade.__name__}
    assert {row[0] for row in ROWS} == {name for name in graders if not name.startswith("_")}
    assert len(ROWS) >= 25


def test_the_cut_and_the_length_are_metrics():
    doc = {"answers": ["4"], "all_classes": [], "cut": True, "words": 5000}
    assert grade.count(doc, ["4"]) == {"score": 1.0, "cut": 1.0, "words": 5000.0}


def test_code_by_the_other_measure():
    """fuzzywuzzy's own example (its issue 128): difflib starts from the leftmost longest block."""
    doc = {"answers": ["aaaaab"], "all_classes": [], "cut": False, "words": 1}
    assert grade.code(doc, ["ababab"])["score_difflib"] == 0.33
    assert grade.code(doc, ["aaaaab"])["score_difflib"] == 1.0
    assert grade.code(doc, [""])["score_difflib"] == 0.0


def test_long_sentences_do_not_run_out_of_stack():
    words = [f"w{i}" for i in range(900)]
    before = sys.getrecursionlimit()
    assert metrics.rouge_l(" ".join(words), " ".join(words[:800])) == pytest.approx(2 * 800 / 1700, abs=1e-6)
    assert sys.getrecursionlimit() == before


def test_a_reference_without_a_paragraph_is_an_error():
    with pytest.raises(ValueError, match="names no paragraph"):
        metrics.retrieval("3", "three")
