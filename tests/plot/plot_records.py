"""Runs and traces as `evictbench run` and `evictbench trace` leave them, made of numbers given."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa

from evictbench.store import run_folder
from evictbench.store.records import sample_line
from evictbench.store.trace_files import RETENTION, RETENTION_FILE, STEPS, STEPS_FILE, TRACE, arrow_schema, write_table

PROTOCOL = {
    "name": "default",
    "context": 512,
    "question": "unseen",
    "chat": False,
    "thoughts": False,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_new_tokens": "auto",
    "card_limit": None,
    "prefill": "native",
    "chunk": None,
    "differs": [],
}


def identity(policy="h2o", budget="64", tasks=("niah",), suite="ruler", model="tiny", data=None, **changes):
    protocol = PROTOCOL | {name: changes.pop(name) for name in list(changes) if name in PROTOCOL}
    settings = changes.pop("settings", {})
    extra = {"weights": changes.pop("policy_weights")} if "policy_weights" in changes else {}
    return {
        "suite": suite,
        "tasks": tasks if isinstance(tasks, dict) else dict.fromkeys(tasks, "1.0"),
        "data": data or {"generator": "version 1"},
        "policy": {"name": policy.partition(":")[0], "label": policy, "settings": settings, "source": None} | extra,
        "budget": budget,
        "protocol": protocol,
        "seed": 0,
        "model": model,
        "weights": "sha256:0",
        "dtype": "float32",
    } | changes


def sample(doc_id, score, task="niah", repeat=0, occupancy=64.0, **changes):
    return {
        "task": task,
        "doc_id": doc_id,
        "repeat": repeat,
        "score": score,
        "metrics": {"score": score},
        "answer": None,
        "thinking": "none",
        "text": f"it is {doc_id}",
        "tokens": [1, 2, 3],
        "output_tokens": 3,
        "token_limit": 16,
        "truncated": False,
        "repetition": False,
        "prompt_tokens": 500,
        "border": 480,
        "prompt_hash": "0" * 16,
        "prompt_ids": "eJwDAAAAAAE=",
        "occupancy_max": int(np.ceil(occupancy)),
        "occupancy_mean": occupancy,
        "cache_bytes": int(occupancy * 1000),
        "prefill_peak_bytes": 10**6,
        "prefill_seconds": 0.5,
        "first_token_seconds": 0.5,
        "decode_seconds": 0.1,
        "decode_steps": 2,
    } | changes


def write_run(root, samples, **what):
    """One cell of these samples; returns its folder."""
    whole = identity(**what)
    label = whole["policy"]["label"]
    path = run_folder.run_folder(
        root, whole["suite"], whole["model"], label, whole["budget"], run_folder.fingerprint_hash(whole)
    )
    path.mkdir(parents=True)
    run = {
        "results_version": run_folder.RESULTS_VERSION,
        "fingerprint": run_folder.fingerprint_hash(whole),
        "identity": whole,
        "sessions": [{}],
    }
    (path / run_folder.RUN).write_text(json.dumps(run))
    (path / run_folder.SAMPLES).write_bytes(
        b"".join(sample_line(line | {"session": 0}, run["fingerprint"]) for line in samples)
    )
    return path


def right(count, of, **changes):
    """So many right answers of so many."""
    return [sample(doc_id, float(doc_id < count), **changes) for doc_id in range(of)]


def write_grid(root, **what):
    """Three policies at two budgets, and the full cache."""
    for policy, scores in {"h2o": (4, 8), "tova": (6, 9), "random": (0, 2)}.items():
        for budget, count in zip(("64", "128"), scores, strict=True):
            write_run(root, right(count, 10, occupancy=float(budget)), policy=policy, budget=budget, **what)
    write_run(root, right(9, 10, occupancy=500.0), policy="full", budget=None, **what)


def steps(contexts=(256,), rows=(1,), new=32, lost=()):
    """The steps of a trace: the full cache, whose bytes grow, and h2o at 64 entries."""
    found, cell = [], -1
    for context in contexts:
        for count in rows:
            for policy, budget in (("full", None), ("h2o", "64")):
                cell += 1
                common = {"cell": cell, "policy": policy, "budget": budget, "context": context, "rows": count}
                if (policy, context, count) in lost:
                    found.append(common | {"phase": "decode", "step": 0, "position": 0, "status": "out of memory"})
                    continue
                for prompt in range(count):
                    for step, seen in enumerate(range(128, context + 1, 128)):
                        found.append(_step(common, "prefill", step + prompt * 100, seen, 10.0 + seen / 100))
                for step in range(new):
                    seen = context + step + 1
                    found.append(_step(common, "decode", step, seen, 2.0 + step % 3 + (0 if budget else seen / 100)))
    return pd.DataFrame(found)


def _step(common, phase, step, seen, ms):
    entries = seen if common["budget"] is None else min(seen, int(common["budget"]))
    return common | {
        "phase": phase,
        "step": step,
        "position": seen,
        "ms": ms,
        "attention_ms": ms / 2,
        "signals_ms": 0.0,
        "policy_ms": ms / 4,
        "rest_ms": ms / 4,
        "entries_max": entries,
        "entries_mean": float(entries),
        "cache_bytes": entries * 1000 * common["rows"],
        "allocated_bytes": 10**6 + entries * 1000 * common["rows"],
        "reserved_bytes": 2 * 10**6,
        "status": "ok",
    }


def retention(policies=("recent", "first"), size=16, length=64, layers=2, heads=2):
    """One policy that keeps the last tokens, and one that keeps the first."""
    rows = []
    for cell, policy in enumerate(policies):
        for seen in range(size, length + 1, size):
            positions = np.arange(seen - size, seen) if policy == "recent" else np.arange(size)
            rows += [
                {
                    "cell": cell,
                    "policy": policy,
                    "budget": str(size),
                    "seen": seen,
                    "layer": layer,
                    "head": head,
                    "positions": positions,
                }
                for layer in range(layers)
                for head in range(heads)
            ]
    return pd.DataFrame(rows)


def write_trace(folder, found, kept=None):
    folder.mkdir(parents=True)
    (folder / TRACE).write_text(json.dumps({"model": "tiny", "device": "cpu"}))
    _parquet(found, STEPS, folder / STEPS_FILE)
    if kept is not None:
        _parquet(kept, RETENTION, folder / RETENTION_FILE)
    return folder


def _parquet(frame, columns, file):
    write_table(pa.Table.from_pandas(frame, schema=arrow_schema(columns), preserve_index=False), file)
