"""RULER's protocols: the default is what ran without one, and IndexMem++'s is that of its authors' code."""

from __future__ import annotations

from evictbench.suite import GREEDY
from evictbench.suites.ruler import SUITE


def test_protocols():
    default, theirs = SUITE.protocols["default"], SUITE.protocols["indexmem_pp"]
    assert set(SUITE.protocols) == {"default", "indexmem_pp"}
    assert (default.sampling, default.repeats, default.context, default.limit) == (GREEDY, 1, None, None)
    assert (default.thinking, default.question, default.share_of) == (None, None, "prompt")
    assert default.tasks == theirs.tasks == SUITE.tasks
    assert (theirs.context, theirs.limit, theirs.question, theirs.thinking) == (8192, 500, "unseen", False)
    assert (theirs.sampling, theirs.repeats, theirs.max_new_tokens) == (GREEDY, 1, None)
    assert "5a5826ed" in theirs.source
    assert theirs.share_of == "context"  # (1 - c) of the benchmark's length, whatever the prompt's
