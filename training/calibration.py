"""The shares in the card of DMS's bundled gate: `python -m training.calibration --data-dir DATA --texts FILE`.

A training ends with a table from its own held-out texts, most of which are needles in noise. This one is measured on
solved GSM8K problems of the train split that no training text holds: of such text the gate keeps more than of noise, so
that a budget taken from this table is met on reasoning, and not exceeded on the rest. Rewrites the card in place; what
the same thresholds keep of the held-out texts stays in it as `held_out_calibration`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bundled import POLICIES
from .texts import CALCULATION, SEED, TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCKS = 8
NOTE = (
    "Calibrated on solved GSM8K problems; of the held-out texts of its training, mostly needles in noise, "
    "it keeps less:"
)
FOLDER = POLICIES / "dms" / "weights" / "smollm2"


def main() -> None:
    """Measure, and write the card anew."""
    import torch

    from evictbench.cache import attention
    from evictbench.models import load, policy_weights
    from evictbench.policies.dms.calibration import measured
    from evictbench.policies.dms.gate import SeparateGate

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", type=Path, required=True, help="a folder with gsm8k/train.jsonl")
    parser.add_argument("--texts", type=Path, required=True, help="what the gate was trained on")
    parser.add_argument("--weights", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    source = load.resolve("smollm2")
    tokenizer, model = load.load_tokenizer(source), load.load_model(source, "cpu", "float32")
    attention.use(model)
    model.requires_grad_(False)
    known = policy_weights.load(str(arguments.weights))
    card = dict(known.card)
    gate = SeparateGate(known.tensors["weight"].float(), known.tensors["bias"].float(), card["epsilon"])
    blocks = [torch.tensor([ids]) for ids in unseen(arguments.data_dir, arguments.texts, tokenizer)]
    table = measured(model, gate, blocks, sinks=card["sinks"], window=card["window"])
    held_out = card.get("held_out_calibration") or card["calibration"]
    note = f"{NOTE} {_compared(table, held_out)}"
    card["notes"] = [*(other for other in card["notes"] if not other.startswith(NOTE)), note]
    card |= {
        "calibration": {"text": "solved GSM8K problems of the train split, none of them trained on", **table},
        "held_out_calibration": held_out,
    }
    policy, variant = card.pop("policy"), card.pop("variant")
    policy_weights.save(arguments.weights, policy, variant, known.tensors, card)
    print(json.dumps(card["calibration"]))


def unseen(data_dir: Path, texts: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Packed problems that stand in none of the texts, `TOKENS` token ids each."""
    trained = "\n".join(json.loads(line)["text"] for line in texts.read_text().splitlines())
    records = [json.loads(line) for line in (data_dir / "gsm8k/train.jsonl").read_text().splitlines()]
    solutions = [
        f"Question: {record['question'].strip()}\nAnswer: {CALCULATION.sub('', record['answer']).strip()}\n\n"
        for record in records
        if record["question"].strip() not in trained
    ]
    random.Random(f"{SEED} calibration").shuffle(solutions)
    rest = iter(solutions)
    for _ in range(BLOCKS):
        block = ""
        while len(tokenizer.encode(block)) < TOKENS:
            block += next(rest)
        yield tokenizer.encode(block)[:TOKENS]


def _compared(table: dict[str, Any], held_out: dict[str, Any]) -> str:
    """What the held-out texts keep at some of the table's thresholds."""
    import numpy as np

    known = held_out["thresholds"][::-1], held_out["shares"][::-1]
    places = range(1, len(table["thresholds"]), 3)
    found = [(float(np.interp(table["thresholds"][at], *known)), table["shares"][at]) for at in places]
    return ", ".join(f"{less:.0%} for {share:.0%}" for less, share in found) + "."


if __name__ == "__main__":
    main()
