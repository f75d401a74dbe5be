"""The reference results: every policy and yardstick on the bundled model, on the same samples.

    python -m studies.reference --data-dir DATA                # run what is not finished
    python -m studies.reference --data-dir DATA --part 1/2     # every other cell; another process takes 2/2
    python -m studies.reference --data-dir DATA --extend       # first take what is published already, then go on
    python -m studies.reference --data-dir DATA --publish      # run nothing, write what is finished

RULER's four tasks that the model itself answers best, and fidelity on GSM8K's test text; float32. Every policy runs
with dense prefill: every prompt is attended whole and cut once at its end, so that one dense pass over a text serves
all cells (`studies.replay`). The policies whose own prefill is another run with that, too. It can be stopped at any
time; finished samples are not run again. The published folders, in results/reference/bundled, are run
folders without the text of any prompt or answer, which `evictbench plot`, `report` and `gate` read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.evaluation.settings import RunSettings
from evictbench.models import bundled
from evictbench.policy import Prefill
from evictbench.registry import parse_policy, split_policies
from evictbench.store import run_folder
from evictbench.store.files import write_json
from evictbench.store.summary import summarise
from studies.command import exit_code, in_part, part, say

if TYPE_CHECKING:
    from evictbench.evaluation.plan import RunPlan

POLICIES = (
    *("full", "random", "streaming_llm", "tova", "h2o"),
    *("snapkv", "snapkv:decode=reselect", "oracle:label=mean", "oracle:label=max"),
    *("kvpop:label=mean", "kvpop_mlp:label=mean", "kvpop:label=max", "kvpop_mlp:label=max"),
    *("kvpop:recent=0", "kvpop_mlp:recent=0"),  # as published: no share of the entries is kept for what is recent
    *("indexmem_pp", "distillcache", "dms"),
)
BUDGETS = ("128", "256")
PREFILLS: tuple[Prefill, ...] = ("dense", "native")

WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    "fidelity": {"tasks": "gsm8k", "context": 864, "max_new_tokens": "96", "limit": 50},
    "ruler": {
        "tasks": "niah_single_1,niah_single_2,niah_multivalue,niah_multikey_1",
        "context": 1024,
        "limit": 60,
        "suite_version": "1",
    },
}
"""By suite: its tasks, tokens of a sample in all, tokens of a continuation, samples per task; the version of its
prompts, where the published ones were made with an earlier one.

RULER's tasks are the four that the full cache answers best, with 20 prompts each: 100, 100, 80 and 75%. Of the others,
niah_single_3 70, niah_multiquery 67.5, fwe 45, vt 38, niah_multikey_3 25, niah_multikey_2 15, cwe 9.5; the two qa tasks
need data of their own. (`evictbench run --policy full --suite ruler --context 1024 --limit 20`)
"""

FOLDER = Path("results/reference/bundled")

TEXT = frozenset({"text", "tokens", "prompt_ids", "answer", "by_position"})
"""Fields that a published sample leaves out: the text itself, and detail that no comparison uses."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="a folder that holds gsm8k/test.jsonl")
    parser.add_argument("--suites", default=",".join(WORKLOADS))
    parser.add_argument("--policies", default=",".join(POLICIES), help="only these, named as on the command line")
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--prefill", default=",".join(PREFILLS), help="dense, native (where it is not dense), or both")
    parser.add_argument("--limit", type=int, help="the first so many samples of each task alone")
    parser.add_argument("--part", type=part, default=(1, 1), help="1/2: only the first of two halves of the cells")
    parser.add_argument("--block", type=int, default=20, help="samples that go through all cells before the next ones")
    parser.add_argument("--publish", action="store_true", help="run nothing, copy what is finished")
    parser.add_argument("--extend", action="store_true", help="go on from what is published")
    parser.add_argument("--out", type=Path, default=Path("results/runs/reference"))
    parser.add_argument("--folder", type=Path, help=f"publish, there; {FOLDER} with --publish and --extend")
    options = parser.parse_args(arguments)
    if options.folder is None and (options.publish or options.extend):
        options.folder = FOLDER
    return exit_code(_reference, options)


def _reference(options: argparse.Namespace) -> int:
    from studies.cells import plan_cells, run_cells

    named, prefills = split_policies(options.policies), options.prefill.split(",")
    if unknown := [name for name in prefills if name not in PREFILLS]:
        raise UserError(f"--prefill is {' or '.join(PREFILLS)}, or both, not {unknown[0]!r}.")
    for suite, prefill in itertools.product(options.suites.split(","), prefills):
        common = RunSettings(policy="full", suite=suite, **_settings(suite, options), prefill=prefill)
        policies = named if prefill == "dense" else [name for name in named if native_is_another(name)]
        cells = plan_cells(policies, options.budgets.split(","), common, say)
        if not options.publish:
            mine = in_part(cells, options.part)
            if options.extend:
                for cell in mine:
                    begin_from_published(cell.plan, options.folder)
            if not run_cells(mine, options.block, say):
                say("stopped; what is finished is kept")
                return 130
        for cell in cells if options.folder else ():
            say(f"{cell.title}: {publish(cell.plan, options.folder)} samples in {options.folder}")
    return 0


def native_is_another(name: str) -> bool:
    """Whether a policy's own prefill is not dense. name: as the command names it, with or without a weights folder."""
    policy = parse_policy(name.partition("@")[0]).policy
    return policy.needs_budget and policy.prefill_mode("native") != "dense"


def _settings(suite: str, options: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name, value in WORKLOADS[suite].items() if value is not None}
    if options.limit is not None:
        given["limit"] = options.limit
    common = {"model": bundled.NAME, "dtype": "float32", "batch_size": options.block}
    return {**common, **given, "data_dir": options.data_dir, "out": options.out}


def begin_from_published(plan: RunPlan, root: Path) -> bool:
    """Copy the published samples of a cell that was never run, so that it goes on from them; False if it has none."""
    published = root / plan.folder.relative_to(plan.settings.out)
    if plan.folder.exists() or not published.is_dir():
        return False
    shutil.copytree(published, plan.folder)
    return True


def publish(plan: RunPlan, root: Path) -> int:
    """Copy those of a cell's finished samples that its plan asks for, without text; returns how many there are."""
    if not plan.folder.exists():
        return 0
    asked = {planned.key for planned in plan.prompts}
    samples = run_folder.read_samples(plan.folder)
    lines = [
        {name: value for name, value in samples[key].items() if name not in TEXT}
        for key in sorted(samples)
        if key in asked
    ]
    if not lines:
        return 0
    folder = root / plan.folder.relative_to(plan.settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / run_folder.RUN, run_folder.read_run(plan.folder))
    summary = {"fingerprint": run_folder.read_run(plan.folder)["fingerprint"], "identity": plan.fingerprint}
    write_json(folder / run_folder.SUMMARY, summary | summarise(lines, plan.asked))
    with (folder / run_folder.SAMPLES).open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return len(lines)


if __name__ == "__main__":
    raise SystemExit(main())
