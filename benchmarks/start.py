"""`python -m benchmarks.start [--quick]`: seconds from the command to its help, and to a run's first token.

`evictbench --help` in a process of its own. A run: the command line in a new process whose generator takes the time of
its first token, counted from just before that process was started. Bundled model, StreamingLLM, RULER at 512 tokens;
medians of five, files already in the page cache.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.sections import RESULTS, goal, replace_section

RUN = ["--policy", "streaming_llm", "--budget", "128", "--suite", "ruler", "--tasks", "niah_single_1"]
RUN += ["--context", "512", "--limit", "1"]

# Generation's own start of a request ends with its first token.
WATCHED = """
import sys, time
from pathlib import Path
from evictbench.generation.generator import Generator
start = Generator.start
def watched(self, request):
    result = start(self, request)
    if not Path(sys.argv[1]).exists():
        Path(sys.argv[1]).write_text(repr(time.time()))
    return result
Generator.start = watched
from evictbench.cli.app import main
sys.exit(main(sys.argv[2:]))
"""


def help_seconds() -> float:
    """From the command to its end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "evictbench", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def first_token_seconds() -> float:
    """From the command to the first token of its first prompt."""
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder) / "first"
        began = time.time()
        command = [sys.executable, "-c", WATCHED, str(marker), "run", *RUN, "--out", f"{folder}/runs"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        return float(marker.read_text()) - began


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="once each: only that it runs")
    parser.add_argument("--out", type=Path, help="file of results; RESULTS.md, or none with --quick")
    options = parser.parse_args()
    runs = 1 if options.quick else 5
    helps = statistics.median(help_seconds() for _ in range(runs))
    first = statistics.median(first_token_seconds() for _ in range(runs))
    text = (
        f"`evictbench --help`: {helps:.2f} s ({goal(helps, '<=', 0.4)}). "
        f"First token of a run on the bundled model: {first:.2f} s ({goal(first, '<=', 6)})."
    )
    print(text)
    if out := options.out or (None if options.quick else RESULTS):
        replace_section(out, "Start", "python -m benchmarks.start", text)


if __name__ == "__main__":
    main()
