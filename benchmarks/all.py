"""`python -m benchmarks.all [--quick]`: every benchmark in order, each in its own process; RESULTS.md is written.

One that fails is named at the end, and the exit code is 1; the others still run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec

ORDER = ("against_kvpress", "steps", "queue", "start", "limit", "__main__", "learned")


def main() -> int:
    """Run them; the number of the exit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only that they run; nothing is written")
    options = parser.parse_args()
    failed = []
    for name in ORDER:
        module = f"benchmarks.{name}"
        if find_spec(module) is None:
            failed.append(f"{module} (not there)")
            continue
        print(f"== {module}", flush=True)
        command = [sys.executable, "-m", module, *(["--quick"] if options.quick else [])]
        if subprocess.run(command, check=False).returncode:
            failed.append(module)
    if failed:
        print("Failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
