"""The shares in the card of DMS's bundled gate: `python -m training.calibration --data-dir DATA --texts FILE`.

A training ends with a table from its own held-out texts, most of which are needles in noise. This one is measured on
solved GSM8K problems of the train split that no training text holds. The gate keeps more of such text than of noise, so
that a budget taken from this table is met on reasoning, and not exceeded on the rest. The card is rewritten in place;
the shares of the held-out texts stay in it as `held_out_calibration`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bundled import POLICIES
from .texts import SEED, TOKENS, solved_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCKS = 8
NOTE = (
    "Calibrated on solved GSM8K problems; of the held-out texts of its training, mostly needles in noise, "
    "it keeps less:"
)
FOLDER = POLICIES / "dms" / "weights" / "smollm2"


def main() -> None:
    """Measure the shares, and rewrite the card."""
    import torch

    from evictbench.cache import attention
    from evictbench.models import bundled, load, policy_weights
    from evictbench.policies.dms.calibration import calibration_table
    from evictbench.policies.dms.gate import SeparateGate

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", type=Path, required=True, help="a folder with gsm8k/train.jsonl")
    parser.add_argument("--texts", type=Path, required=True, help="what the gate was trained on")
    parser.add_argument("--weights", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    source = load.resolve(bundled.NAME)
    tokenizer, model = load.load_tokenizer(source), load.load_model(source, "cpu", "float32")
    attention.use(model)
    model.requires_grad_(False)
    weights = policy_weights.load(str(arguments.weights))
    card = dict(weights.card)
    gate = SeparateGate(weights.tensors["weight"].float(), weights.tensors["bias"].float(), card["epsilon"])
    blocks = [torch.tensor([ids]) for ids in unseen(arguments.data_dir, arguments.texts, tokenizer)]
    table = calibration_table(model, gate, blocks, sinks=card["sinks"], window=card["window"])
    held_out = card.get("held_out_calibration") or card["calibration"]
    note = f"{NOTE} {_compared(table, held_out)}"
    card["notes"] = [*(other for other in card["notes"] if not other.startswith(NOTE)), note]
    card |= {
        "calibration": {"text": "solved GSM8K problems of the train split, none of them trained on", **table},
        "held_out_calibration": held_out,
    }
    policy, variant = card.pop("policy"), card.pop("variant")
    policy_weights.save(arguments.weights, policy, variant, weights.tensors, card)
    print(json.dumps(card["calibration"]))


def unseen(data_dir: Path, texts: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Blocks of `TOKENS` token ids of packed problems that are in none of the texts."""
    trained = "\n".join(json.loads(line)["text"] for line in texts.read_text().splitlines())
    records = [json.loads(line) for line in (data_dir / "gsm8k/train.jsonl").read_text().splitlines()]
    solutions = solved_problems(record for record in records if record["question"].strip() not in trained)
    random.Random(f"{SEED} calibration").shuffle(solutions)
    rest = iter(solutions)
    for _ in range(BLOCKS):
        block = ""
        while len(tokenizer.encode(block)) < TOKENS:
            block += next(rest)
        yield tokenizer.encode(block)[:TOKENS]


def _compared(table: dict[str, Any], held_out: dict[str, Any]) -> str:
    """The shares that are kept of the held-out texts at some of the table's thresholds, as text."""
    import numpy as np

    curve = held_out["thresholds"][::-1], held_out["shares"][::-1]
    rows = range(1, len(table["thresholds"]), 3)
    pairs = [(float(np.interp(table["thresholds"][row], *curve)), table["shares"][row]) for row in rows]
    return ", ".join(f"{less:.0%} for {share:.0%}" for less, share in pairs) + "."


if __name__ == "__main__":
    main()
