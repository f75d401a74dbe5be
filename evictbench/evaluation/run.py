"""One cell: a model, a suite, a policy and a budget, from settings to a results folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from evictbench.errors import RunFailed, UserError
from evictbench.evaluation import tasks
from evictbench.evaluation.plan import Plan, make_plan
from evictbench.evaluation.prompts import Planned
from evictbench.evaluation.settings import Settings
from evictbench.evaluation.thinking import Answer, answer_of
from evictbench.models import load, machine
from evictbench.store import run_folder
from evictbench.store.summary import repeats_itself, summarise

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.generation.generator import Completion, Request

PROMPT_IDS_KEPT = 65_536
"""Prompts of up to this many tokens keep their ids in the sample line; longer ones their hash only."""


class Watcher(Protocol):
    """Whoever shows a run while it goes on."""

    def phase(self, text: str) -> None:
        """Something begins that takes a while."""

    def planned(self, plan: Plan, finished: int) -> None:
        """Everything is checked; `finished` of the samples asked for are there from before."""

    def warn(self, sentence: str) -> None:
        """Something the user should know."""

    def start(self, finished: Sequence[dict[str, Any]], total: int) -> None:
        """Generation begins, with these sample lines there from before, of `total`."""

    def sample(self, line: dict[str, Any]) -> None:
        """A sample is finished and on the disk."""


class TextGenerator(Protocol):
    """What makes completions of requests; `evictbench.generation.generator.Generator`, or a test's own."""

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions as they finish, in any order."""


MakeGenerator = Callable[[Plan], tuple[TextGenerator, str]]
"""Loads the model of a plan; gives the generator and the device, in words."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to. `interrupted`: stopped by Ctrl-C before every sample was done."""

    plan: Plan
    summary: dict[str, Any]
    interrupted: bool


def run(settings: Settings, watch: Watcher, make_generator: MakeGenerator | None = None) -> Outcome:
    """Run what is not yet finished of a cell, and summarise all of it. Every finished sample is kept, whatever ends
    the run. Raises UserError for bad input, RunFailed if a policy saw more than its budget."""
    return run_plan(make_plan(settings, watch.phase), watch, make_generator)


def run_plan(
    plan: Plan,
    watch: Watcher,
    make_generator: MakeGenerator | None = None,
    only: Collection[run_folder.Key] | None = None,
) -> Outcome:
    """The same for a plan that is made, or for some of its samples."""
    with run_folder.open_run(plan.folder, plan.identity) as folder:
        _check_same_prompts(plan, folder)
        wanted = [planned for planned in plan.prompts if only is None or planned.key in only]
        todo = [planned for planned in wanted if planned.key not in folder.samples]
        watch.planned(plan, len(plan.prompts) - len(todo))
        for sentence in _warnings(plan):
            watch.warn(sentence)
        interrupted = False
        try:
            if todo:
                _generate(plan, folder, todo, watch, make_generator or load_generator)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            summary = _summary(plan, folder)
            folder.write_summary(summary)
    return Outcome(plan, summary, interrupted)


def load_model(plan: Plan) -> PreTrainedModel:
    """Load the weights of a plan's model."""
    settings = plan.settings
    return load.load_model(plan.source, settings.device, plan.dtype, settings.trust_remote_code)


def load_generator(plan: Plan, load: Callable[[Plan], PreTrainedModel] = load_model) -> tuple[TextGenerator, str]:
    """Load the weights, or ask `load` for the model, and make a generator of it: the engine's, or that of a suite
    that does not generate text."""
    from evictbench.generation.generator import Generator

    settings, own = plan.settings, plan.checked.suite.generator
    if own is not None:
        generator = own(plan, load)
        return generator, str(getattr(generator, "device", settings.device))
    model = load(plan)
    engine = Generator(
        model,
        plan.tokenizer,
        plan.policy,
        plan.checked.budget,
        prefill=settings.prefill,
        chunk=settings.chunk,
        batch_size=settings.batch_size,
        seed=settings.seed,
    )
    return engine, machine.device_of(model)


def _generate(
    plan: Plan,
    folder: run_folder.RunFolder,
    todo: Sequence[Planned],
    watch: Watcher,
    make_generator: MakeGenerator,
) -> None:
    watch.phase("loading the weights")
    generator, device = make_generator(plan)
    session = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine.versions(),
        "commit": machine.commit(),
        "device": device,
        "batch_size": plan.settings.batch_size,
    }
    for sentence in folder.start_session(session):
        watch.warn(sentence)
    asked = {planned.key for planned in plan.prompts}
    finished = [line for key, line in folder.samples.items() if key in asked]
    watch.start(finished, len(plan.prompts))
    by_key = {planned.key: planned for planned in todo}
    with closing(_completions(plan, generator, todo)) as completions:
        for completion in completions:
            planned = by_key[_key(completion)]
            _check_occupancy(plan, folder, planned, completion)
            line = _line(plan, planned, completion)
            folder.append(line)
            watch.sample(line)


def _completions(plan: Plan, generator: TextGenerator, todo: Sequence[Planned]) -> Generator[Completion, None, None]:
    from evictbench.generation.generator import Request

    requests = (
        Request(
            key=planned.key,
            prompt=tuple(planned.prompt.ids),
            border=planned.prompt.border,
            max_new_tokens=planned.max_new_tokens,
            stop=planned.prompt.stop,
            sampling=plan.checked.protocol.sampling,
            draw=planned.draw,
            thinking=planned.prompt.thinking.on,
        )
        for planned in todo
    )
    yield from generator.run(requests)


def _key(completion: Completion) -> run_folder.Key:
    key = completion.key
    assert isinstance(key, tuple)
    return key


def _line(plan: Plan, planned: Planned, completion: Completion) -> dict[str, Any]:
    """The record of one sample. Times in seconds, sizes in bytes."""
    prompt = planned.prompt
    said, scored = _graded(plan, planned, completion)
    by_position = getattr(completion, "by_position", None)
    return {
        "task": prompt.task,
        "doc_id": prompt.doc_id,
        "repeat": planned.repeat,
        "score": scored.score,
        "metrics": scored.metrics,
        **({} if by_position is None else {"by_position": by_position}),
        "answer": scored.answer,
        "thinking": said.thought,
        "text": completion.text,
        "tokens": list(completion.tokens),
        "output_tokens": len(completion.tokens),
        "token_limit": planned.max_new_tokens,
        "truncated": completion.truncated or said.thought == "unclosed",
        "repetition": repeats_itself(completion.tokens),
        "prompt_tokens": len(prompt.ids),
        "border": prompt.border,
        "prompt_hash": run_folder.hash_ids(prompt.ids),
        "prompt_ids": run_folder.pack_ids(prompt.ids) if len(prompt.ids) <= PROMPT_IDS_KEPT else None,
        "occupancy_max": completion.occupancy_max,
        "occupancy_mean": completion.occupancy_mean,
        "cache_bytes": completion.cache_bytes,
        "prefill_peak_bytes": completion.prefill_peak_bytes,
        "prefill_seconds": completion.prefill_seconds,
        "first_token_seconds": completion.first_token_seconds,
        "decode_seconds": completion.decode_seconds,
        "decode_steps": completion.decode_steps,
    }


def _graded(plan: Plan, planned: Planned, completion: Completion) -> tuple[Answer, tasks.Scored]:
    """What a completion says after its thought, and its grade: the generator's own, where it gives one, or the task's.
    An unclosed thought is wrong, whatever the task makes of an empty text."""
    own = getattr(completion, "score", None)
    if own is not None:
        said = Answer(completion.text, "none")
        return said, tasks.Scored(float(own), dict(getattr(completion, "metrics", {})))
    prompt = planned.prompt
    said = answer_of(completion.text, prompt.thinking.opened)
    scored = tasks.score(plan.tasks[prompt.task], prompt.doc_id, said.text)
    if said.thought == "unclosed":
        scored = tasks.Scored(0.0, {**scored.metrics, tasks.METRIC: 0.0}, None if scored.answer is None else "")
    return said, scored


def _check_occupancy(plan: Plan, folder: run_folder.RunFolder, planned: Planned, completion: Completion) -> None:
    budget = plan.checked.budget
    if budget is None or not plan.policy.guarded:
        return
    allowed = budget.at(planned.compressible, len(planned.prompt.ids) + len(completion.tokens))
    # Where heads differ the budget is their mean.
    seen = completion.occupancy_mean if plan.policy.ragged else completion.occupancy_max
    if seen > allowed:
        raise RunFailed(
            f"{plan.checked.chosen.label} let a decode query see {seen:g} entries where the budget "
            f"allows {allowed} ({planned.prompt.task}, sample {planned.prompt.doc_id}); this is a fault of the policy "
            f"or of the engine, and that sample is not kept. {len(folder.samples)} finished samples are in "
            f"{folder.path}."
        )


def _check_same_prompts(plan: Plan, folder: run_folder.RunFolder) -> None:
    """Samples from before must have been made from the prompts that this command makes now."""
    hashes: dict[tuple[str, int], str] = {}
    for planned in plan.prompts:
        before = folder.samples.get(planned.key)
        if before is None:
            continue
        task, doc_id, _ = planned.key
        if (task, doc_id) not in hashes:
            hashes[task, doc_id] = run_folder.hash_ids(planned.prompt.ids)
        if before["prompt_hash"] != hashes[task, doc_id]:
            raise UserError(
                f"{folder.path} holds samples of other prompts than this command makes (first: {task}, sample "
                f"{doc_id}): the tokenizer, its chat template or the suite has changed. Name another folder with "
                "--out, or move that one away."
            )


def _warnings(plan: Plan) -> Iterator[str]:
    for name, count in plan.cut.items():
        yield (
            f"{count} of {plan.documents[name]} answers of {name} may be shorter than its card allows "
            f"(--max-new-tokens {plan.settings.max_new_tokens}, window of {plan.model}): not the card's protocol."
        )
    for name, left_out in plan.overlong.items():
        count = len(left_out)
        of = count + plan.documents[name]
        yield (
            f"{count} of {of} prompts of {name} do not fit the window of {plan.model} with their answers and are left "
            "out (--skip-overlong): its score is over the others."
        )


def _summary(plan: Plan, folder: run_folder.RunFolder) -> dict[str, Any]:
    return {
        "fingerprint": folder.run["fingerprint"],
        "folder": str(folder.path),
        "identity": plan.identity,
        "skipped": dict(plan.prepared.skipped),
        "answers_cut": dict(plan.cut),
        "overlong": {name: list(ids) for name, ids in plan.overlong.items()},
        "differs": {name: {"used": used, "protocol": own} for name, (used, own) in plan.differs.items()},
        "warnings": list(_warnings(plan)),
        # From the disk: Ctrl-C may fall between a sample's line and its count.
        **summarise(run_folder.read_samples(folder.path).values(), plan.asked, plan.settings.at),
    }
