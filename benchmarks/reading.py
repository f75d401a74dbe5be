"""Reading results back: 1,000 runs of 1,000 samples, and the help of `evictbench plot`.

    python -m benchmarks.reading [--runs 1000] [--samples 1000]

The lines are as long as those of a real run: prompts of some 800 tokens, answers of 80. Files are read from the page
cache, as they are just written.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import evictbench
from evictbench.store import run_folder
from evictbench.store.records import sample_line

GOALS = {"results": 10.0, "plot --help": 0.5}
"""Seconds, at most."""


def write(root: Path, runs: int, samples: int) -> None:
    """Runs that differ in their budget; every one has the same lines, in a file of its own."""
    rng = random.Random(0)
    lines = []
    for doc_id in range(samples):
        ids = zlib.compress(b"".join(rng.randrange(49152).to_bytes(4, "little") for _ in range(800)))
        score = float(rng.random() < 0.7)
        line = {
            "task": "niah_single_1",
            "doc_id": doc_id,
            "repeat": 0,
            "score": score,
            "metrics": {"score": score},
            "answer": None,
            "thinking": "none",
            "text": " ".join(f"word{rng.randrange(999)}" for _ in range(50)),
            "tokens": [rng.randrange(49152) for _ in range(80)],
            "output_tokens": 80,
            "token_limit": 128,
            "truncated": False,
            "repetition": False,
            "prompt_tokens": 800,
            "border": 760,
            "prompt_hash": f"{rng.randrange(2**64):016x}",
            "prompt_ids": base64.b64encode(ids).decode(),
            "occupancy_max": 256,
            "occupancy_mean": 256.0,
            "cache_bytes": 6083280,
            "prefill_peak_bytes": 20342544,
            "prefill_seconds": 0.7311097070014512,
            "first_token_seconds": 0.7311097070014512,
            "decode_seconds": 0.028049249375271756,
            "decode_steps": 79,
            "session": 0,
        }
        lines.append(line)
    protocol = {"name": "default", "context": 1024, "question": "unseen", "prefill": "native", "differs": []}
    for number in range(runs):
        budget = str(number + 16)
        identity = {
            "suite": "ruler",
            "tasks": {"niah_single_1": "1.0"},
            "data": {"ruler": "generator version 1"},
            "policy": {"name": "h2o", "label": "h2o", "settings": {}, "source": None},
            "budget": budget,
            "protocol": protocol,
            "seed": 0,
            "model": "smollm2",
            "weights": "sha256:0",
            "dtype": "float32",
        }
        fingerprint = run_folder.fingerprint_hash(identity)
        folder = run_folder.run_folder(root, "ruler", "smollm2", "h2o", budget, fingerprint)
        folder.mkdir(parents=True)
        run = {"results_version": run_folder.RESULTS_VERSION, "fingerprint": fingerprint}
        run |= {"identity": identity, "sessions": [{}]}
        (folder / run_folder.RUN).write_text(json.dumps(run))
        (folder / run_folder.SAMPLES).write_bytes(b"".join(sample_line(line, fingerprint) for line in lines))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=1000)
    options.add_argument("--samples", type=int, default=1000)
    given = options.parse_args()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), given.runs, given.samples)
        started = time.perf_counter()
        rows = len(evictbench.results(folder))
        seconds["results"] = time.perf_counter() - started
        assert rows == given.runs * given.samples
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "evictbench", "plot", "--help"], check=True, capture_output=True)
    seconds["plot --help"] = time.perf_counter() - started
    for name, goal in GOALS.items():
        print(f"{name:<12} {seconds[name]:6.2f} s   at most {goal:g} s   {'ok' if seconds[name] <= goal else 'MISSED'}")
    return 0 if all(seconds[name] <= goal for name, goal in GOALS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
