"""The project's own gate: every policy on short texts that the project makes itself, for `evictbench gate --exact`.

    python -m studies.exact                       # runs every cell anew into results/runs/exact
    evictbench gate results/runs/exact --baseline results/reference/exact --exact     # both of them: make gate
    python -m studies.exact --renew               # where a result is meant to change: the new runs are the baseline

The bundled model in float32, budgets and windows smaller than the texts, prompts read in several chunks. Fidelity sees
any change of what is kept or how it is attended to; a few RULER prompts see what is generated. Cells are ordinary runs;
what the full cache says of a text is computed once for all of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.store import run_folder
from evictbench.store.files import write_json

if TYPE_CHECKING:
    from evictbench.evaluation.plan import Kept, Plan
    from evictbench.evaluation.run import TextGenerator
    from evictbench.evaluation.settings import Settings
    from evictbench.generation.fidelity import DensePasses

RUNS = Path("results/runs/exact")
BASELINE = Path("results/reference/exact")

POLICIES = (
    "full",
    "random:recent=8",
    "oracle:window=8",
    "streaming_llm",
    "tova",
    "h2o",
    "snapkv:window=8",
    "dms:window=8",
    "kvpop:window=8",
    "kvpop_mlp:window=8",
    "indexmem_pp:window=8,centroids=8",
    "distillcache",
)
"""Every policy, in its native prefill."""

TEXTS, CONTEXT, CONTINUATION, BUDGET = 20, 80, 12, "48"
"""Texts of fidelity; tokens of each, of which the continuation are so many; entries that a policy may keep."""

SENTENCES = 400
"""Of prose, enough for the texts."""

CHUNK = 48
"""Tokens of a prompt in one forward pass: several chunks to a prompt."""

PROMPTS, PROMPT_CONTEXT, ANSWER, SHARE = 4, 272, 8, "70%"
"""RULER prompts; tokens of each with the answer that its card allows; tokens that are generated; what may be kept."""

DROPPED = ("prompt_ids", "prefill_seconds", "first_token_seconds", "decode_seconds")
"""What a baseline leaves out: it is long, or it is the machine's and not the result's."""


def write_texts(folder: Path) -> Path:
    """The texts, as one file: prose that is generated, the same everywhere."""
    from evictbench.suites.ruler.prose import sentences

    file = folder / "prose.txt"
    file.write_text(" ".join(islice(sentences(), SENTENCES)) + "\n", encoding="utf-8")
    return file


def fidelity(policy: str, texts: Path, out: Path, weights: str | None = None) -> Settings:
    """A policy on the texts. weights: of a learned policy that does not bring its own."""
    from evictbench.evaluation.settings import Settings

    return Settings(
        suite="fidelity",
        tasks="text",
        haystack=texts,
        context=CONTEXT,
        max_new_tokens=str(CONTINUATION),
        limit=TEXTS,
        batch_size=TEXTS,
        weights=weights,
        **_common(policy, BUDGET, out),
    )


def ruler(policy: str, out: Path) -> Settings:
    """A policy on RULER prompts."""
    from evictbench.evaluation.settings import Settings

    return Settings(
        suite="ruler",
        tasks="niah_single_1",
        context=PROMPT_CONTEXT,
        chat="off",
        max_new_tokens=str(ANSWER),
        limit=PROMPTS,
        **_common(policy, SHARE, out),
    )


def _common(policy: str, budget: str, out: Path) -> dict[str, Any]:
    from evictbench.registry import parse_policy

    return {
        "policy": policy,
        "budget": budget if parse_policy(policy).policy.needs_budget else None,
        "chunk": CHUNK,
        "device": "cpu",
        "dtype": "float32",
        "out": out,
    }


class Quiet:
    """Watches runs and says nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


class Runner:
    """Runs cells one after another with one model; prompts and dense passes are made once."""

    def __init__(self) -> None:
        self._kept: Kept = {}
        self._dense_passes: DensePasses = {}
        self._model: Any = None

    def run(self, settings: Settings) -> Path:
        """Run a cell anew; its folder. What is there from before was made by other code, and is removed."""
        from evictbench.evaluation.plan import make_plan
        from evictbench.evaluation.run import run_plan

        plan = make_plan(settings, kept=self._kept)
        if plan.folder.exists():
            shutil.rmtree(plan.folder)
        run_plan(plan, Quiet(), self._generator)
        return plan.folder

    def _generator(self, plan: Plan) -> tuple[TextGenerator, str]:
        from evictbench.evaluation.run import load_generator

        generator, device = load_generator(plan, self._load)
        comparison = getattr(generator, "comparison", None)
        if comparison is not None:
            comparison.dense_passes = self._dense_passes
        return generator, device

    def _load(self, plan: Plan) -> Any:
        from evictbench.evaluation.run import load_model

        if self._model is None:
            self._model = load_model(plan)
        return self._model


def keep(folders: Iterable[Path], runs: Path, baseline: Path) -> None:
    """Copy runs into a baseline in the place of earlier ones, without what only says where they were made."""
    for folder in folders:
        to = baseline / folder.relative_to(runs)
        run = run_folder.read_run(folder)
        before = [file.parent for file in to.parent.glob(f"*/{run_folder.RUN}")]
        for other in before:
            if _cell(run_folder.read_run(other)) == _cell(run):
                shutil.rmtree(other)
        to.mkdir(parents=True)
        write_json(to / run_folder.RUN, {**run, "sessions": run["sessions"][-1:]})
        samples = run_folder.read_samples(folder)
        lines = [json.dumps(_without(samples[key]), ensure_ascii=False) for key in sorted(samples)]
        (to / run_folder.SAMPLES).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        summary = json.loads((folder / run_folder.SUMMARY).read_text(encoding="utf-8"))
        write_json(to / run_folder.SUMMARY, {**_without(summary), "folder": to.name})


def _cell(run: Mapping[str, Any]) -> tuple[str, str | None]:
    return run["identity"]["policy"]["label"], run["identity"]["budget"]


def _without(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    return {name: _without(value) for name, value in content.items() if name not in DROPPED}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.exact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RUNS, help="folder for the runs")
    parser.add_argument("--only", help="policies, as --policies takes them; default: all")
    parser.add_argument("--part", default="1/1", help="1/2: only every other of these; another process takes 2/2")
    parser.add_argument("--renew", action="store_true", help=f"write the runs into the baseline, {BASELINE}")
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    from evictbench.registry import split_policies, unknown

    wanted = split_policies(options.only) if options.only else POLICIES
    for name in wanted:
        if name not in POLICIES:
            raise unknown("policy", name, POLICIES)
    part, of = (int(number) for number in options.part.split("/"))
    runner, folders = Runner(), []
    with tempfile.TemporaryDirectory() as texts:
        file = write_texts(Path(texts))
        for name in wanted[part - 1 :: of]:
            for settings in (fidelity(name, file, options.out), ruler(name, options.out)):
                folders.append(runner.run(settings))
                print(folders[-1], file=sys.stderr, flush=True)
    if options.renew:
        keep(folders, options.out, BASELINE)


if __name__ == "__main__":
    from evictbench.terminal.console import quieten

    quieten()
    raise SystemExit(main())
