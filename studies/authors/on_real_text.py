"""Three differences from the authors' code, counted at the prompt's end on the bundled model and GSM8K's questions.

    python -m studies.authors.on_real_text --data-dir DATA

How often the last query would drop the newest entry (TOVA); how often SnapKV's chosen entries end in equal votes; how
many of the entries that SnapKV's authors choose for each query head one set for a KV head lacks; and how many entries
the query heads of a KV head hold together. A line for each budget, means over texts, layers and heads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from studies.command import exit_code, say

if TYPE_CHECKING:
    from torch import Tensor

WINDOW, KERNEL = 32, 7
"""SnapKV's, in the experiments of its authors."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.authors.on_real_text")
    parser.add_argument("--data-dir", type=Path, required=True, help="holds gsm8k/test.jsonl")
    parser.add_argument("--budgets", default="128,256", help="entries, by commas (default 128,256)")
    parser.add_argument("--length", type=int, default=768, help="tokens of a text (default 768)")
    parser.add_argument("--limit", type=int, default=8, help="texts (default 8)")
    return exit_code(_count, parser.parse_args(arguments))


def _count(options: argparse.Namespace) -> int:
    if not options.budgets.replace(",", "").isdigit():
        raise UserError(f"--budgets are whole numbers by commas, not {options.budgets}.")
    budgets = [int(budget) for budget in options.budgets.split(",") if budget]
    if wrong := [budget for budget in budgets if not WINDOW < budget < options.length]:
        raise UserError(f"A budget is above {WINDOW} entries and below {options.length} tokens, not {wrong[0]}.")
    texts = list(_texts(options.data_dir, options.length, options.limit))
    found: dict[int, list[dict[str, float]]] = {budget: [] for budget in budgets}
    for number, window in enumerate(_windows(texts)):
        for layer in window:
            for budget in budgets:
                found[budget].append(counts(layer, budget))
        say(f"text {number + 1} of {len(texts)}")
    for budget, rows in found.items():
        print(f"{budget}: " + ", ".join(f"{name} {fmean(row[name] for row in rows):.4g}" for name in rows[0]))
    return 0


def counts(window: Tensor, budget: int) -> dict[str, float]:
    """What is counted of one layer at one budget. window: the last queries' softmax rows, `[kv_heads, group, WINDOW,
    tokens]`.

    newest dropped: 1 if TOVA drops the newest entry. tied: the share of query heads whose chosen entries end in equal
    votes under a pool of the largest. lacking: the share of the entries chosen for a query head that the KV head's set
    lacks. together: entries that the query heads of a KV head hold together, the window's among them.
    """
    from torch.nn.functional import max_pool1d

    newest = int((window[..., -1, :].mean((0, 1)) > window[..., -1, -1].mean()).sum()) >= budget - 1
    votes = window[..., :-WINDOW].sum(-2)
    chosen = budget - WINDOW
    pooled = max_pool1d(votes, KERNEL, 1, KERNEL // 2)
    ranked = pooled.sort(-1, descending=True).values
    tied = (ranked[..., chosen - 1] == ranked[..., chosen]).float().mean()
    of_heads = _best(pooled, chosen)
    of_group = _best(max_pool1d(votes.mean(1), KERNEL, 1, KERNEL // 2), chosen)
    lacking = (of_heads & ~of_group[:, None]).sum() / of_heads.sum()
    together = of_heads.any(1).sum(-1).float().mean() + WINDOW
    return {"newest dropped": newest, "tied": float(tied), "lacking": float(lacking), "together": float(together)}


def _best(votes: Tensor, count: int) -> Tensor:
    """Which entries have the most votes, of equal ones the earlier; boolean, as the votes."""
    import torch

    index = votes.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(votes, dtype=torch.bool).scatter(-1, index, True)


def _texts(folder: Path, length: int, limit: int) -> Iterator[list[int]]:
    """Questions and answers in order, put together to so many tokens each."""
    path = folder / "gsm8k/test.jsonl"
    if not path.is_file():
        raise UserError(f"There is no {path}.")
    from evictbench.models import bundled
    from evictbench.models.load import load_tokenizer, resolve

    tokenizer: Any = load_tokenizer(resolve(bundled.NAME))
    lines = path.read_text(encoding="utf-8").splitlines()
    tokens: list[int] = []
    for line in lines:
        document = json.loads(line)
        text = f"Question: {document['question']}\nAnswer: {document['answer']}\n\n"
        tokens += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) >= length:
            yield tokens[:length]
            tokens, limit = [], limit - 1
        if not limit:
            return


def _windows(texts: Sequence[Sequence[int]]) -> Iterator[list[Tensor]]:
    """Of each text and layer the last queries' softmax rows, as `counts` takes them."""
    import torch

    from evictbench.models import bundled
    from evictbench.models.load import load_model, resolve

    model: Any = load_model(resolve(bundled.NAME), device="cpu", dtype="float32")
    model.set_attn_implementation("eager")
    rows: list[Tensor] = []

    def note(module: Any, arguments: Any, output: Any) -> None:
        weights = output[1][0, :, -WINDOW:]
        rows.append(weights.unflatten(0, (model.config.num_key_value_heads, -1)).clone())

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(note)
    for tokens in texts:
        with torch.no_grad():
            model(torch.tensor([tokens]), use_cache=False, logits_to_keep=1)
        yield rows.copy()
        rows.clear()


if __name__ == "__main__":
    import sys

    sys.exit(main())
