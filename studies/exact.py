"""The project's own gate: every policy on short texts that the project makes itself, for `evictbench gate --exact`.

    python -m studies.exact                       # runs every cell anew into results/runs/exact
    evictbench gate results/runs/exact --baseline results/reference/exact --exact     # both of them: make gate
    python -m studies.exact --renew               # where a result is meant to change: the new runs are the baseline

The bundled model in float32, budgets and windows smaller than the texts, prompts read in several chunks. Fidelity shows
any change of what is kept or how it is attended to, and a few RULER prompts show any change of what is generated. Cells
are ordinary runs; the full cache's passes over a text are computed once for all of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import unknown
from evictbench.evaluation.settings import RunSettings
from evictbench.registry import parse_policy, recorded_policy, split_policies
from evictbench.store import run_folder
from evictbench.store.files import write_json
from studies.command import exit_code, in_part, part, say

if TYPE_CHECKING:
    from evictbench.evaluation.plan import RunPlan, SharedInputs
    from evictbench.evaluation.run import TextGenerator
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
    "snapkv:window=8,decode=reselect",
    "snapkv:window=8,decode=reselect,votes=window",
    "dms:window=8",
    "kvpop:window=8",
    "kvpop_mlp:window=8",
    "indexmem_pp:window=8,centroids=8",
    "distillcache",
)
"""Every policy, in its native prefill."""

TEXTS, CONTEXT, CONTINUATION, BUDGET = 20, 80, 12, "48"
"""Of fidelity: texts, tokens of each, those of them in the continuation, and entries that a policy may keep."""

SENTENCES = 400
"""Sentences of prose, enough for the texts."""

CHUNK = 48
"""Tokens of a prompt in one forward pass: several chunks to a prompt."""

PROMPTS, PROMPT_CONTEXT, ANSWER, SHARE = 4, 272, 8, "70%"
"""Of RULER: prompts, tokens of each with the longest answer, tokens that are generated, and the share that is kept."""

DROPPED = ("prompt_ids", "prefill_seconds", "first_token_seconds", "decode_seconds")
"""Fields that a baseline leaves out: they are long, or they depend on the machine."""


def write_texts(folder: Path) -> Path:
    """Write the texts, generated prose that is the same everywhere, as one file; returns it."""
    from evictbench.suites.ruler.prose import sentences

    file = folder / "prose.txt"
    file.write_text(" ".join(islice(sentences(), SENTENCES)) + "\n", encoding="utf-8")
    return file


def fidelity(policy: str, texts: Path, out: Path, weights: str | None = None) -> RunSettings:
    """The settings of a policy on the texts. weights: of a learned policy that does not bring its own."""
    return RunSettings(
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


def ruler(policy: str, out: Path) -> RunSettings:
    """The settings of a policy on RULER prompts."""
    return RunSettings(
        suite="ruler",
        suite_version="1",  # the baseline's
        tasks="niah_single_1",
        context=PROMPT_CONTEXT,
        chat="off",
        max_new_tokens=str(ANSWER),
        limit=PROMPTS,
        **_common(policy, SHARE, out),
    )


def _common(policy: str, budget: str, out: Path) -> dict[str, Any]:
    return {
        "policy": policy,
        "budget": budget if parse_policy(policy).policy.needs_budget else None,
        "chunk": CHUNK,
        "device": "cpu",
        "dtype": "float32",
        "out": out,
    }


class NoWatcher:
    """The watcher of a run that shows nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


class Runner:
    """Runs cells one after another with one model; prompts and dense passes are computed once."""

    def __init__(self) -> None:
        self._kept: SharedInputs = {}
        self._dense_passes: DensePasses = {}
        self._model: Any = None

    def run(self, settings: RunSettings) -> Path:
        """Run a cell anew; returns its folder. An earlier run there was made by other code, and is removed."""
        from evictbench.evaluation.plan import make_plan
        from evictbench.evaluation.run import run_plan

        plan = make_plan(settings, shared=self._kept)
        if plan.folder.exists():
            shutil.rmtree(plan.folder)
        run_plan(plan, NoWatcher(), self._generator)
        return plan.folder

    def _generator(self, plan: RunPlan) -> tuple[TextGenerator, str]:
        from evictbench.evaluation.run import load_generator

        generator, device = load_generator(plan, self._load)
        comparison = getattr(generator, "comparison", None)
        if comparison is not None:
            comparison.dense_passes = self._dense_passes
        return generator, device

    def _load(self, plan: RunPlan) -> Any:
        from evictbench.evaluation.run import load_model

        if self._model is None:
            self._model = load_model(plan)
        return self._model


def renew_baseline(folders: Iterable[Path], runs: Path, baseline: Path) -> None:
    """Copy runs into a baseline in place of earlier ones, without the fields of `DROPPED`.

    folders: of the runs, inside `runs`.
    """
    for folder in folders:
        target = baseline / folder.relative_to(runs)
        run = run_folder.read_run(folder)
        before = [file.parent for file in target.parent.glob(f"*/{run_folder.RUN}")]
        for other in before:
            if _cell(run_folder.read_run(other)) == _cell(run):
                shutil.rmtree(other)
        target.mkdir(parents=True)
        write_json(target / run_folder.RUN, {**run, "sessions": run["sessions"][-1:]})
        samples = run_folder.read_samples(folder)
        lines = [json.dumps(_without(samples[key]), ensure_ascii=False) for key in sorted(samples)]
        (target / run_folder.SAMPLES).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        summary = json.loads((folder / run_folder.SUMMARY).read_text(encoding="utf-8"))
        write_json(target / run_folder.SUMMARY, {**_without(summary), "folder": target.name})


def _cell(run: Mapping[str, Any]) -> tuple[str, str | None]:
    return recorded_policy(run["identity"]["policy"])[0], run["identity"]["budget"]


def _without(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    return {name: _without(value) for name, value in content.items() if name not in DROPPED}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.exact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RUNS, help="folder for the runs")
    parser.add_argument("--only", help="policies, as --policies takes them; default: all")
    parser.add_argument(
        "--part", type=part, default=(1, 1), help="1/2: only every other of these; another process takes 2/2"
    )
    parser.add_argument("--renew", action="store_true", help=f"write the runs into the baseline, {BASELINE}")
    return exit_code(_run, parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    wanted = split_policies(options.only) if options.only else POLICIES
    for name in wanted:
        if name not in POLICIES:
            raise unknown("policy", name, POLICIES)
    runner, folders = Runner(), []
    with tempfile.TemporaryDirectory() as texts:
        file = write_texts(Path(texts))
        for name in in_part(wanted, options.part):
            for settings in (fidelity(name, file, options.out), ruler(name, options.out)):
                folders.append(runner.run(settings))
                say(str(folders[-1]))
    if options.renew:
        renew_baseline(folders, options.out, BASELINE)
    return 0


if __name__ == "__main__":
    from evictbench.terminal.console import silence_libraries

    silence_libraries()
    raise SystemExit(main())
