"""Does fidelity rank policies the same way on other texts? Texts of several seeds, one budget, policies paired by text.

    python -m benchmarks.fidelity_ranking --data-dir DATA                  # 20 texts x 3 seeds on the bundled model
    python -m benchmarks.fidelity_ranking --task text --haystack book.txt --budget 256 --context 2048

Prints the mean KL (and agreement) of every policy for each seed, whether the order is the same for every seed, and for
neighbours in the pooled order whether the paired difference is clear of zero. Runs resume: results are ordinary ones.
"""

from __future__ import annotations

import argparse
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

POLICIES = ("streaming_llm", "tova", "h2o", "snapkv:decode=reselect,votes=window", "random")

Values = dict[tuple[int, int], float]
"""(seed, text) to a metric."""


def main() -> None:
    options = _options()
    metrics = {name: _measure(name, options) for name in options.policies}
    kl = {name: values["kl"] for name, values in metrics.items()}
    agreement = {name: values["agreement"] for name, values in metrics.items()}
    print(
        f"\n{options.model}, {options.task}, budget {options.budget}, context {options.context}, {options.texts} texts"
    )
    orders = []
    for seed in options.seeds:
        order = sorted(kl, key=lambda name: _mean(kl[name], seed))
        orders.append(order)
        row = ", ".join(f"{name} {_mean(kl[name], seed):.4f} ({_mean(agreement[name], seed):.1%})" for name in order)
        print(f"seed {seed}: {row}")
    same = all(order == orders[0] for order in orders)
    print(f"\nmean KL, least first (agreement). The order is {'the same' if same else 'not the same'} for every seed.")
    if len(orders) > 1 and len(kl) > 2:
        print(f"Kendall's tau between seeds: {', '.join(f'{_tau(a, b):.2f}' for a, b in combinations(orders, 2))}")
    pooled = sorted(kl, key=lambda name: fmean(kl[name].values()))
    swapped = []
    for better, worse in pairwise(pooled):
        mean, low, high = _difference(kl[worse], kl[better])
        clear = low > 0
        swaps = sum(order.index(better) > order.index(worse) for order in orders)
        print(f"{worse} - {better}: {mean:.4f} ({low:.4f} to {high:.4f}), {'clear' if clear else 'not clear'} of zero")
        if swaps and clear:
            swapped.append(f"{better} and {worse}")
    verdict = f"no: {', '.join(swapped)} change places" if swapped else "no clear difference is turned round by a seed"
    print(f"Stable: {verdict}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--task", default="gsm8k", choices=["gsm8k", "longbench", "ruler", "text"])
    parser.add_argument("--budget", default="128")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--haystack", type=Path)
    parser.add_argument("--max-new-tokens", default="auto", help="tokens of a continuation")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=Path("results/runs"))
    return parser.parse_args()


def _measure(policy: str, options: argparse.Namespace) -> dict[str, Values]:
    """Values by metric, over every seed; samples from earlier runs are not run again."""
    from evictbench.evaluation.run import run
    from evictbench.evaluation.settings import RunSettings
    from evictbench.store import run_folder

    metrics: dict[str, Values] = {"kl": {}, "agreement": {}}
    for seed in options.seeds:
        settings = RunSettings(
            policy=policy,
            suite="fidelity",
            budget=None if policy == "full" else options.budget,
            tasks=options.task,
            context=options.context,
            limit=options.texts,
            model=options.model,
            max_new_tokens=options.max_new_tokens,
            seed=seed,
            device=options.device,
            dtype=options.dtype,
            data_dir=options.data_dir,
            haystack=options.haystack,
            out=options.out,
        )
        outcome = run(settings, _Watcher(f"{policy}, seed {seed}"))
        if outcome.interrupted:
            raise SystemExit(f"interrupted; what is finished is in {options.out}")
        for line in run_folder.read_samples(outcome.plan.folder).values():
            if line["doc_id"] < options.texts:
                for name, values in metrics.items():
                    values[seed, line["doc_id"]] = line["metrics"][name]
    return metrics


def _mean(values: Values, seed: int) -> float:
    return fmean(value for (value_seed, _), value in values.items() if value_seed == seed)


def _difference(first: Values, second: Values) -> tuple[float, float, float]:
    """The mean of first - second over the same texts, and its 95% interval."""
    from scipy.stats import t
    from scipy.stats import tstd as spread

    pairs = [first[key] - second[key] for key in sorted(first.keys() & second.keys())]
    mean = fmean(pairs)
    if len(pairs) < 2:
        return mean, float("-inf"), float("inf")
    half = float(t.ppf(0.975, len(pairs) - 1)) * float(spread(pairs)) / len(pairs) ** 0.5
    return mean, mean - half, mean + half


def _tau(first: list[str], second: list[str]) -> float:
    from scipy.stats import kendalltau

    return float(kendalltau([first.index(name) for name in first], [second.index(name) for name in first]).statistic)


class _Watcher:
    """Prints a line for each sample of a run."""

    def __init__(self, title: str):
        self._title = title

    def planned(self, plan: Any, finished: int) -> None:
        print(f"{self._title}: {finished} of {len(plan.prompts)} are there from before", flush=True)

    def warn(self, sentence: str) -> None:
        print(f"{self._title}: {sentence}", flush=True)

    def phase(self, text: str) -> None:
        """Prints nothing."""

    def start(self, finished: Any, total: int) -> None:
        """Prints nothing."""

    def sample(self, line: dict[str, Any]) -> None:
        print(f"{self._title}: text {line['doc_id']}, KL {line['metrics']['kl']:.4f}", flush=True)


if __name__ == "__main__":
    main()
