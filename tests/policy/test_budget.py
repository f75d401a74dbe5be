"""The budget: what it reads, what it refuses, how many entries it allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evictbench.errors import UserError
from evictbench.policy.budget import Budget


@pytest.mark.parametrize(
    ("text", "tokens", "share", "shown"),
    [
        ("256", 256, None, "256"),
        (" 1 ", 1, None, "1"),
        ("25%", None, 0.25, "25%"),
        ("12.5%", None, 0.125, "12.5%"),
        ("100%", None, 1.0, "100%"),
        ("0.5%", None, 0.005, "0.5%"),
        ("+8", 8, None, "8"),
    ],
)
def test_reads_and_gives_back(text, tokens, share, shown):
    budget = Budget.parse(text)
    assert (budget.tokens, budget.share, str(budget)) == (tokens, share, shown)
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0", "keeps nothing"),
        ("0%", "keeps nothing"),
        ("-5", "negative"),
        ("-5%", "negative"),
        ("101%", "over 100%"),
        ("100.01%", "over 100%"),
        ("2.5", "not a whole number"),
        ("lots", "not a number"),
        ("", "not a number"),
        ("1e3", "not a number"),
        ("nan", "not a number"),
        ("25 %x", "not a number"),
        ("0.00000001%", "too small a share"),
    ],
)
def test_refuses_in_one_sentence(text, complaint):
    with pytest.raises(UserError) as refusal:
        Budget.parse(text)
    sentence = str(refusal.value)
    assert complaint in sentence
    assert "256" in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_a_number_is_itself():
    assert Budget.parse("256").at(10, 10_000) == 256


@pytest.mark.parametrize(
    ("share", "prompt", "seen", "entries"),
    [
        ("25%", 1000, 1000, 250),
        ("25%", 1003, 10, 250),
        ("25%", 1000, 1100, 275),
        ("25%", 50, 60, 32),
        ("29%", 100, 1, 32),
    ],
)
def test_a_share_is_of_the_longer_of_prompt_and_seen_and_never_below_32(share, prompt, seen, entries):
    assert Budget.parse(share).at(prompt, seen) == entries


@given(st.integers(1, 100), st.integers(200, 200_000))
def test_a_whole_percentage_is_exact(percent, length):
    assert Budget.parse(f"{percent}%").at(length, 0) == max(32, percent * length // 100)
