"""Damaged results give right numbers or a sentence. `make damage` tries 20,000 of them."""

import pytest
from store.damage import Harness

from evictbench.errors import UserError

SEEDS = range(5)


@pytest.fixture(scope="module", params=[True, False], ids=["with checksums", "as earlier versions wrote them"])
def harness(request, tmp_path_factory):
    return Harness(tmp_path_factory.mktemp("damage"), request.param)


def test_every_reader_reads_what_is_whole(harness):
    assert {name for name, found in harness.whole.items() if isinstance(found, UserError)} == set()


def test_damage_is_right_or_a_sentence(harness):
    for number in SEEDS:
        harness.try_one(number)
