"""The child process of judge.py: a comparison comes in on each line and goes out on one, as JSON. It runs as a file and
imports nothing of ours.

A comparison may run forever or take all memory (a tower of powers does both). The parent kills this process at its
time limit; if the parent is gone, an alarm does. Memory is limited too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

MEMORY_BYTES = 4 << 30
DECIMALS = 9  # that a decimal and an exact answer have to share; math-verify asks for 6, so .0000672 is 0.000067


def compare(gold: str, answer: str) -> dict[str, Any]:
    """Whether two LaTeX answers are equal to math-verify, and `answer` in a form that equal answers mostly share."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    # no timeouts of its own: those are signals, which no computation inside C code would notice
    read = [parse(f"\\boxed{{{text}}}", targets, parsing_timeout=None) for text in (gold, answer)]
    equal = bool(
        all(read) and verify(*read, float_rounding=DECIMALS, allow_set_relation_comp=True, timeout_seconds=None)
    )
    return {"equal": equal, "shown": str(read[1][0]) if read[1] else ""}


def main(alarm_seconds: int) -> None:
    """Answer until the parent closes the pipe. A comparison that fails is unequal."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    compare("1", "1.0")  # imports everything and builds tables before the first comparison is timed
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        if hasattr(signal, "alarm"):
            signal.alarm(alarm_seconds)
        try:
            verdict = compare(*json.loads(line))
        except Exception as error:
            verdict = {"equal": False, "shown": "", "error": type(error).__name__}
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        print(json.dumps(verdict), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
