"""`--suite lm-eval:<task>`: any lm-eval task, group or tag as a suite, its results like any other's.

The lm-eval task makes its own prompts and grades the answers (prompts.py), as under lm-eval's evaluator. It is wrapped
in a task of ours whose documents are the finished prompts, so that generation goes through the ordinary run.
Log-likelihood tasks bring a generator that scores their choices (loglikelihood.py).
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.evaluation.tasks import check_task_files, task_manager
from evictbench.harness.arguments import SCORED, generation_settings
from evictbench.harness.prompts import prepare
from evictbench.registry import LM_EVAL_NAME
from evictbench.suite.spec import GREEDY, Protocol, Sampling, Suite

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

WRAPPER = """\
# Made for one run: the finished prompts of the lm-eval task of this name.
task: {name}
custom_dataset: !function evictbench.harness.prompts.documents
dataset_path: ""
dataset_kwargs:
  task: {name}
output_type: generate_until
test_split: test
doc_to_text: input
doc_to_target: target
process_results: !function evictbench.harness.prompts.grade
metric_list:
  - metric: score
    aggregation: mean
    higher_is_better: true
generation_kwargs:
  max_gen_toks: {limit}
  do_sample: false
  until: {stop}
repeats: 1
metadata:
  version: {version}
  chat: false
"""
"""YAML of the wrapping task. `chat: false`: where the run asks for the chat template, a prompt is in it already."""


def suite_for(name: str) -> Suite:
    """A suite of one task, group or tag. name: lm-eval's, or the path of a YAML file that holds a task.

    Raises UserError for an unknown name, and for tasks that cannot be run under a policy.
    """
    manager, names = _find(name)
    configs = {leaf: dict(manager.task_index[leaf].cfg or {}) for leaf in names}
    kinds = {str(config.get("output_type", "generate_until")) for config in configs.values()}
    if refused := kinds - {"generate_until", *SCORED}:
        raise UserError(
            f"The lm-eval task {name} is of the kind {refused.pop()}, which scores whole texts without a prompt and "
            "says nothing about eviction: use --suite fidelity for perplexity under a policy."
        )
    scores = kinds <= set(SCORED)
    if not scores and kinds != {"generate_until"}:
        raise UserError(f"lm-eval's {name} holds tasks that generate and tasks that do not: name some of one kind.")
    sampling, repeats = _sampling(name, configs)
    folder = Path(tempfile.mkdtemp(prefix="evictbench-lm-eval-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for leaf, config in configs.items():
        given = {} if scores else config.get("generation_kwargs") or {}
        _, limit, stop = generation_settings(given, leaf)
        version = json.dumps((config.get("metadata") or {}).get("version", 0))
        text = WRAPPER.format(name=leaf, limit=1 if scores else limit, stop=json.dumps(list(stop)), version=version)
        (folder / f"{len(list(folder.iterdir()))}.yaml").write_text(text)
    title = names[0] if name.endswith(".yaml") else name
    return Suite(
        name=f"{LM_EVAL_NAME}{title}",
        summary=f"lm-eval's {title}, as it stands",
        folder=folder,
        tasks=names,
        question="seen",
        context_field=None,
        default_context=None,
        default_limit=None,
        prepare=lambda request: prepare(manager, names, request),
        protocols={
            "default": Protocol(source="lm-eval", tasks=names, sampling=sampling, repeats=repeats, chat=False),
        },
        generator=_loglikelihood_generator if scores else None,
    )


def _loglikelihood_generator(plan: Any, load: Callable[[Any], Any]) -> Any:
    from evictbench.harness.loglikelihood import LoglikelihoodGenerator

    return LoglikelihoodGenerator(plan, load(plan))


def _find(name: str) -> tuple[TaskManager, tuple[str, ...]]:
    """The task manager that knows a name, and the names of the tasks that it stands for."""
    if name.endswith(".yaml"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"There is no task file {name}.")
        manager = task_manager(include_path=str(path.resolve().parent), include_defaults=False)
        defined = [leaf for leaf, entry in manager.task_index.items() if entry.yaml_path == path.resolve()]
        if not defined:
            raise UserError(f"The file {name} defines no lm-eval task.")
        leaves = tuple(_leaves(manager, defined[0], defined[0]))
        check_task_files(manager, {defined[0], *leaves})
        return manager, leaves
    manager = _own_tasks()
    if name not in manager.task_index:
        near = get_close_matches(name, manager.all_tasks, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`lm_eval ls tasks` lists them."
        raise UserError(f"lm-eval has no task {name!r}: {hint}")
    return manager, tuple(dict.fromkeys(_leaves(manager, name, name)))


@lru_cache(maxsize=1)
def _own_tasks() -> TaskManager:
    """The manager of all tasks that come with lm-eval; making it takes seconds."""
    return task_manager()


def _leaves(manager: TaskManager, name: str, asked: str) -> Iterator[str]:
    """The tasks in a task, group or tag. asked: the name that the user gave, for sentences."""
    entry = manager.task_index.get(name)
    kind = entry.kind.name if entry is not None else ""
    if entry is None or kind == "PY_TASK":
        raise UserError(
            f"lm-eval's {asked} holds {name}, which is no task of a YAML file: run it with "
            "`evictbench-lm-eval --model evictbench`."
        )
    if kind == "TASK":
        yield name
        return
    children = sorted(entry.tags) if kind == "TAG" else (entry.cfg or {}).get("task", [])
    for child in [children] if isinstance(children, str) else children:
        if not isinstance(child, str):
            raise UserError(f"lm-eval's {name} changes its tasks in place: name one of its tasks instead.")
        yield from _leaves(manager, child, asked)


def _sampling(name: str, configs: Mapping[str, Mapping[str, Any]]) -> tuple[Sampling, int]:
    """How the tasks sample their answers, and how many each; filters that count votes are left to maj@k."""
    ways = {
        (generation_settings(config.get("generation_kwargs") or {}, leaf)[0], int(config.get("repeats") or 1))
        for leaf, config in configs.items()
        if config.get("output_type") not in SCORED
    }
    if len(ways) > 1:
        raise UserError(f"The tasks of lm-eval's {name} draw their answers in different ways: name them one by one.")
    sampling, repeats = ways.pop() if ways else (GREEDY, 1)
    return sampling, 1 if sampling == GREEDY else repeats
