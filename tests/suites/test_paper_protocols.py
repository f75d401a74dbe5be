"""Every table of KVpop, IndexMem++ and DistillCache over a suite of ours has a protocol that is named after the paper,
and it says what the table states."""

from __future__ import annotations

from importlib import import_module

import pytest

from evictbench import registry
from evictbench.store.published import read_published

PAPERS = {"2607.05061": "kvpop", "IndexMem++": "indexmem_pp", "2608.08878": "distillcache"}
SUITES = ("ruler", "longbench", "gsm8k", "bbh", "math500", "aime", "hmmt")
LENGTHS = {"2K": "_2k", "4K": "_4k", "8K": "_8k"}
CARD_TOKENS = 32_768
"""Tokens that the cards of the mathematics suites allow an answer."""


def tables():
    """(paper's name, suite, published entry) of every score by a policy of ours; a mean over suites is one of each."""
    own = {*registry.names(registry.POLICIES)}
    for entry in read_published():
        if entry.paper in PAPERS and entry.policy.partition(":")[0] in own:
            for suite in entry.suite.split("+"):
                if suite in SUITES:
                    yield PAPERS[entry.paper], suite, entry


CASES = {(paper, suite, str(entry.protocol)): (paper, suite, entry) for paper, suite, entry in tables()}


def test_all_three_papers_and_all_their_suites_are_there():
    assert {(paper, suite) for paper, suite, _ in CASES} == {
        *(("kvpop", suite) for suite in ("aime", "hmmt")),
        *(("indexmem_pp", suite) for suite in ("ruler", "longbench", "math500", "aime")),
        *(("distillcache", suite) for suite in ("longbench", "gsm8k", "bbh")),
    }


@pytest.mark.parametrize(("paper", "suite", "entry"), CASES.values(), ids=[" ".join(case) for case in CASES])
def test_a_table_has_its_protocol(paper, suite, entry):
    stated = entry.protocol
    known = import_module(f"evictbench.suites.{suite}").SUITE
    length = LENGTHS.get({2048: "2K", 4096: "4K", 8192: "8K"}.get(stated.get("context"), stated.get("context")), "")
    protocol = known.protocols[paper + (length if suite == "longbench" else "")]
    if suite == "ruler" and "samples" not in stated:  # a tenth of the samples, at other lengths: --context
        assert protocol.context == stated.get("context", protocol.context)
    if "thinking" in stated:
        assert protocol.thinking in (None, stated["thinking"])
    if "question" in stated and known.context_field is not None:
        assert protocol.question == stated["question"]
    for name in ("temperature", "top_p", "top_k"):
        assert getattr(protocol.sampling, name) == stated.get(name, getattr(protocol.sampling, name)), name
    if "max_new_tokens" in stated:
        assert (protocol.max_new_tokens or CARD_TOKENS) == stated["max_new_tokens"]
    if entry.task in known.tasks:
        assert entry.task in protocol.tasks
        assert entry.repeats in (None, protocol.repeats)
