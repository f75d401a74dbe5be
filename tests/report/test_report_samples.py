"""Cutting texts and documents until they fit."""

import base64
import gzip
import json
import random
import string

import pytest
from plot.plot_records import sample, write_run

import evictbench
from evictbench.report.samples import _cut, browser


def test_a_cut_keeps_both_ends_and_counts_what_is_between():
    text = "".join(chr(ord("a") + i % 26) for i in range(100))
    begin, left_out, end = _cut(text, 40)
    assert (begin, left_out, end) == (text[:30], 60, text[-10:])
    assert _cut(text, 100) == text
    assert _cut([begin, left_out, end], 20) == [text[:15], 80, text[-5:]]
    assert _cut([begin, left_out, end], 40) == [begin, left_out, end]
    assert _cut(None, 5) is None


def unpacked(pack):
    return json.loads(gzip.decompress(base64.b64decode(pack.data)))


@pytest.fixture
def samples(tmp_path):
    letters = random.Random(0)  # which no packing makes short
    for policy in ("h2o", "tova"):
        lines = [sample(doc, doc / 64, text="".join(letters.choices(string.printable, k=2500))) for doc in range(64)]
        write_run(tmp_path, lines, policy=policy)
    return evictbench.results(tmp_path, text=False)


def test_texts_are_cut_before_documents_are_left_out(samples):
    roomy = browser(samples, None, None, 10**6)
    assert (len(unpacked(roomy.packs[0])["docs"]), roomy.packs[0].documents) == (64, 64)
    tight = browser(samples, None, None, len(roomy.packs[0].data) - 1)
    pack = unpacked(tight.packs[0])
    assert len(pack["docs"]) == 64
    assert isinstance(pack["docs"][0]["arms"]["0"]["text"], list)
    assert any("without their middle" in note for note in tight.notes)


def test_then_every_second_document_and_in_the_end_nothing(samples):
    small = browser(samples, None, None, 60_000)
    pack = unpacked(small.packs[0])
    assert len(small.packs[0].data) <= 60_000
    numbers = [document["doc"] for document in pack["docs"]]
    share = 64 // len(numbers)
    assert share > 1
    assert numbers == list(range(0, 64, share))
    assert small.packs[0].documents == len(numbers)
    assert any(f"one of {share} documents" in note for note in small.notes)
    none = browser(samples, None, None, 100)
    assert none.packs == []
    assert any("no room" in note for note in none.notes)
