"""Essay haystacks: the project's own prose, given texts, and how texts are cut into sentences."""

from __future__ import annotations

import hashlib
import re
from itertools import islice
from pathlib import Path

import pytest

from evictbench.errors import UserError
from evictbench.suites.ruler import hub, prose
from evictbench.suites.ruler.haystack import split

PROSE_1 = "8d2a64edc9cc551d6f17ec46da80a427a0e23f36f51dfa5c01ea7b3b38a817f7"  # of the first 8,000 sentences


def test_prose_is_pinned_to_its_version():
    text = "\n".join(islice(prose.sentences(), 8000))
    assert prose.VERSION == "1"
    assert hashlib.sha256(text.encode()).hexdigest() == PROSE_1


def test_prose_is_varied_english_without_end():
    sentences = list(islice(prose.sentences(), 8000))
    text = " ".join(sentences)
    assert len(text) > 131_072 * 4.5  # characters in a token of English
    assert len(set(sentences)) == len(sentences)
    assert not re.search(r"\d|[{}\[\]|]|\(n\)|  | [,.;?]|,,", text)
    assert all(re.fullmatch(r"[“A-Z].*[.?]", sentence) for sentence in sentences)
    words = text.split()
    eights = {tuple(words[i : i + 8]) for i in range(len(words) - 8)}
    assert len(eights) > 0.97 * len(words)
    assert len(set(words)) > 3000


def test_split_keeps_every_word_and_no_abbreviation_ends_a_sentence():
    text = (
        'Dr. Ames came  at 5 p.m. to St. Ives. “Is it\nlate?” he asked. "Yes." Nobody (not even J. Hart) spoke! '
        "Then... silence. e.g. this one"
    )
    sentences = split(text)
    assert " ".join(sentences) == " ".join(text.split())
    assert sentences == [
        "Dr. Ames came at 5 p.m. to St. Ives.",
        "“Is it late?” he asked.",
        '"Yes."',
        "Nobody (not even J. Hart) spoke!",
        "Then... silence. e.g. this one",
    ]


def test_text_without_full_stops_is_cut_all_the_same():
    sentences = split("word " * 1000)
    assert sum(len(sentence.split()) for sentence in sentences) == 1000
    assert max(len(sentence.split()) for sentence in sentences) == 80


def test_a_given_file_is_used_from_its_start_and_again_when_it_ends(documents, prepare, tmp_path):
    lines = [f"The {word} tale is told here first, and it is a short one." for word in ("red", "green", "blue")]
    file = tmp_path / "tales.txt"
    file.write_text("\n\n".join(lines))
    suite = prepare("niah_single_2", context=2048, haystack=file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert suite.data["haystack"] == f"tales.txt ({len(file.read_text())} characters) sha256:{digest}"
    doc = suite.metadata["ruler_samples"]["niah_single_2"][0]
    told = re.findall(r"The (red|green|blue) tale", doc["context"])
    assert told == (["red", "green", "blue"] * 200)[: len(told)]
    assert len(told) > 60


def test_a_folder_of_texts_is_read_in_order(prepare, tmp_path):
    (tmp_path / "b.txt").write_text("Second.")
    (tmp_path / "a.txt").write_text("First.")
    doc = prepare("niah_single_2", haystack=tmp_path).metadata["ruler_samples"]["niah_single_2"][0]
    assert "First. Second. First." in doc["context"]


def test_no_needle_is_hidden_in_a_text_that_holds_its_value(documents, tmp_path):
    plain = [doc["outputs"][0] for doc in documents("niah_single_2")]
    file = tmp_path / "numbers.txt"
    file.write_text(f"The first number is {plain[0]}. Nothing else is here.")
    changed = documents("niah_single_2", haystack=file)
    assert changed[0]["outputs"][0] != plain[0]
    assert changed[0]["context"].count(changed[0]["outputs"][0]) == 1
    assert [doc["outputs"][0] for doc in changed[1:]] == plain[1:]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "cannot be read: No such file or directory."),
        (lambda path: path.write_text(" \n"), "holds no text."),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "is not UTF-8 text."),
        (lambda path: path.mkdir(), "holds no *.txt file."),
    ],
)
def test_a_haystack_that_cannot_be_used(prepare, tmp_path, make, sentence):
    path = tmp_path / "text.txt"
    make(path)
    with pytest.raises(UserError, match=re.escape(sentence)):
        prepare("niah_single_2", haystack=path)


def test_hub_essays_are_used_only_when_asked_for(prepare, monkeypatch):
    asked = []

    def essays():
        asked.append(True)
        return hub.Found("essays on the hub", ["One essay.", "Another essay."])

    monkeypatch.setattr(hub, "essays", essays)
    assert prepare("niah_single_2").data["haystack"] == "generated prose, version 1"
    assert not asked
    suite = prepare("niah_single_2", haystack=Path("hub"))
    assert suite.data["haystack"].startswith("essays on the hub (25 characters) sha256:")
    assert "One essay. Another essay. One" in suite.metadata["ruler_samples"]["niah_single_2"][0]["context"]
    monkeypatch.setattr(hub, "essays", lambda: "it cannot be reached")
    with pytest.raises(UserError, match=r"cannot be had \(it cannot be reached\)"):
        prepare("niah_single_2", haystack=Path("hub"))


def test_a_real_text(documents, shared):
    file = shared / "data" / "ruler" / "essays" / "emerson_essays_first_series.txt"
    for doc in documents("niah_multivalue", context=4096, haystack=file):
        assert 0.97 * 4096 < doc["prompt_tokens"] + 128 <= 4096
