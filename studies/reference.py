"""The reference results: every policy and yardstick on the bundled model, on the same samples.

    python -m studies.reference --data-dir DATA                # run what is not finished
    python -m studies.reference --data-dir DATA --part 1/2     # every other cell; another process takes 2/2
    python -m studies.reference --data-dir DATA --extend       # first take what is published already, then go on
    python -m studies.reference --data-dir DATA --publish      # run nothing, write what is finished

RULER's four tasks that the model itself answers best, and fidelity on GSM8K's test text; float32, every prompt
attended whole and cut once at its end, so that one dense pass over a text serves all cells (`studies.replay`).
Stop it at any time: what is finished is not run again. What is published to results/reference/bundled are run folders
that `evictbench plot`, `report` and `gate` read, without the text of any prompt or answer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError

if TYPE_CHECKING:
    from evictbench.evaluation.plan import Plan

POLICIES = (
    *("full", "random", "streaming_llm", "tova", "h2o", "snapkv", "oracle:label=mean", "oracle:label=max"),
    *("kvpop:label=mean", "kvpop_mlp:label=mean", "kvpop:label=max", "kvpop_mlp:label=max"),
    *("indexmem_pp", "distillcache", "dms"),
)
BUDGETS = ("128", "256")

WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    "fidelity": {"tasks": "gsm8k", "context": 864, "max_new_tokens": "96", "limit": 50},
    "ruler": {
        "tasks": "niah_single_1,niah_single_2,niah_multivalue,niah_multikey_1",
        "context": 1024,
        "limit": 60,
    },
}
"""By suite: its tasks, tokens of a sample in all, tokens of a continuation, samples per task.

RULER's tasks are the four that the full cache answers best, with 20 prompts each: 100, 100, 80 and 75%. Of the others,
niah_single_3 70, niah_multiquery 67.5, fwe 45, vt 38, niah_multikey_3 25, niah_multikey_2 15, cwe 9.5; the two qa tasks
need data of their own. (`evictbench run --policy full --suite ruler --context 1024 --limit 20`)
"""

FOLDER = Path("results/reference/bundled")

TEXT = frozenset({"text", "tokens", "prompt_ids", "answer", "by_position"})
"""What a published sample leaves out: the words themselves, and detail that no comparison uses."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="a folder that holds gsm8k/test.jsonl")
    parser.add_argument("--suites", default=",".join(WORKLOADS))
    parser.add_argument("--policies", default=",".join(POLICIES), help="only these, named as on the command line")
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--limit", type=int, help="the first so many samples of each task alone")
    parser.add_argument("--part", default="1/1", help="1/2: only the first of two halves of the cells")
    parser.add_argument("--block", type=int, default=20, help="samples that go through all cells before the next ones")
    parser.add_argument("--publish", action="store_true", help="run nothing, copy what is finished")
    parser.add_argument("--extend", action="store_true", help="go on from what is published")
    parser.add_argument("--out", type=Path, default=Path("results/runs/reference"))
    parser.add_argument("--folder", type=Path, help=f"publish, there; {FOLDER} with --publish and --extend")
    options = parser.parse_args(arguments)
    if options.folder is None and (options.publish or options.extend):
        options.folder = FOLDER
    try:
        return _reference(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _reference(options: argparse.Namespace) -> int:
    from evictbench.evaluation.settings import Settings
    from evictbench.registry import split_policies
    from studies.cells import plan_cells, run_cells

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    part, of = (int(number) for number in options.part.split("/"))
    for suite in options.suites.split(","):
        common = Settings(policy="full", suite=suite, **_settings(suite, options))
        cells = plan_cells(split_policies(options.policies), options.budgets.split(","), common, say)
        if not options.publish:
            mine = [cell for index, cell in enumerate(cells) if index % of == part - 1]
            if options.extend:
                for cell in mine:
                    begin_from_published(cell.plan, options.folder)
            if not run_cells(mine, options.block, say):
                say("stopped; what is finished is kept")
                return 130
        for cell in cells if options.folder else ():
            say(f"{cell.title}: {publish(cell.plan, options.folder)} samples in {options.folder}")
    return 0


def _settings(suite: str, options: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name, value in WORKLOADS[suite].items() if value is not None}
    if options.limit is not None:
        given["limit"] = options.limit
    common = {"model": "smollm2", "dtype": "float32", "prefill": "dense", "batch_size": options.block}
    return {**common, **given, "data_dir": options.data_dir, "out": options.out}


def begin_from_published(plan: Plan, root: Path) -> bool:
    """Let a cell that has not been run go on from its published samples; whether there are any."""
    published = root / plan.folder.relative_to(plan.settings.out)
    if plan.folder.exists() or not published.is_dir():
        return False
    shutil.copytree(published, plan.folder)
    return True


def publish(plan: Plan, root: Path) -> int:
    """Copy a cell's finished samples that were asked for, without text; how many there are."""
    from evictbench.store import run_folder
    from evictbench.store.files import write_json
    from evictbench.store.summary import summarise

    if not plan.folder.exists():
        return 0
    asked = {planned.key for planned in plan.prompts}
    found = run_folder.read_samples(plan.folder)
    lines = [
        {name: value for name, value in found[key].items() if name not in TEXT} for key in sorted(found) if key in asked
    ]
    if not lines:
        return 0
    folder = root / plan.folder.relative_to(plan.settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / run_folder.RUN, run_folder.read_run(plan.folder))
    summary = {"fingerprint": run_folder.read_run(plan.folder)["fingerprint"], "identity": plan.identity}
    write_json(folder / run_folder.SUMMARY, summary | summarise(lines, plan.asked))
    with (folder / run_folder.SAMPLES).open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return len(lines)


if __name__ == "__main__":
    raise SystemExit(main())
