"""A run: one model on one suite under one policy and budget, from settings to a results folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from evictbench.errors import NotFinite, RunFailed, UserError, WriteFailed
from evictbench.evaluation import full_cache, tasks
from evictbench.evaluation.plan import RunPlan, make_plan
from evictbench.evaluation.prompts import PlannedSample
from evictbench.evaluation.settings import RunSettings
from evictbench.evaluation.thinking import Answer, strip_thought
from evictbench.models import load, machine
from evictbench.models.loaded_weights import UnusedTensors
from evictbench.policy.ragged import PagedPolicy
from evictbench.store import run_folder
from evictbench.store.records import RECENCY_VERSION
from evictbench.store.summary import repeats_itself, summarise

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.generation.generator import Completion, Request


class Watcher(Protocol):
    """Follows a run, to show it."""

    def phase(self, text: str) -> None:
        """A step begins that takes a while."""

    def planned(self, plan: RunPlan, finished: int) -> None:
        """Everything is checked. finished: how many of the samples asked for were finished before."""

    def warn(self, sentence: str) -> None:
        """There is something that the user should know."""

    def start(self, finished: Sequence[dict[str, Any]], total: int) -> None:
        """Generation begins. finished: lines of the samples finished before. total: the number of samples asked for."""

    def sample(self, line: dict[str, Any]) -> None:
        """A sample is finished and on the disk."""


class TextGenerator(Protocol):
    """Answers requests: `evictbench.generation.generator.Generator`, or what a suite or a test puts in its place."""

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield completions as they finish, in any order."""


MakeGenerator = Callable[[RunPlan], tuple[TextGenerator, str]]
"""Loads the model of a plan; returns the generator and the device, in words."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run. summary: as in summary.json. interrupted: Ctrl-C came before every sample was finished."""

    plan: RunPlan
    summary: dict[str, Any]
    interrupted: bool


def run(settings: RunSettings, watcher: Watcher, make_generator: MakeGenerator | None = None) -> Outcome:
    """Make the samples that are not finished yet, and summarise all of them.

    Every finished sample is kept, however the run ends. Raises UserError for bad input, and RunFailed if a decode query
    saw more than the policy's budget.
    """
    return run_plan(make_plan(settings, watcher.phase), watcher, make_generator)


def run_plan(
    plan: RunPlan,
    watcher: Watcher,
    make_generator: MakeGenerator | None = None,
    only: Collection[run_folder.Key] | None = None,
) -> Outcome:
    """Run a plan: see `run`. only: keys of the samples to make; None for all of the plan's."""
    with run_folder.open_run(plan.folder, plan.fingerprint) as folder:
        _check_same_prompts(plan, folder)
        wanted = [planned for planned in plan.prompts if only is None or planned.key in only]
        todo = [planned for planned in wanted if planned.key not in folder.samples]
        watcher.planned(plan, len(plan.prompts) - len(todo))
        for sentence in _warnings(plan):
            watcher.warn(sentence)
        interrupted = False
        try:
            try:
                if todo:
                    _generate(plan, folder, todo, watcher, make_generator or load_generator)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                doubts = list(full_cache.doubts_about(plan))
                summary = _summary(plan, folder, doubts)
                folder.write_summary(summary)
        except WriteFailed as error:
            raise WriteFailed(f"{error} {len(folder.samples)} finished samples are in {plan.folder}.") from error
        for sentence in (*doubts, *_unmeasured(plan, folder)):
            watcher.warn(sentence)
    return Outcome(plan, summary, interrupted)


def load_model(plan: RunPlan) -> PreTrainedModel:
    """Load the model of a plan. Raises UserError where its files are no longer those that were planned with."""
    settings = plan.settings
    model = load.load_model(plan.source, settings.device, plan.dtype, settings.trust_remote_code)
    if load.weights_hash(plan.source, settings.trust_remote_code) != plan.fingerprint["weights"]:
        raise UserError(f"The files of {plan.model} were changed since this run was planned: start it again.")
    return model


def load_generator(plan: RunPlan, load: Callable[[RunPlan], PreTrainedModel] = load_model) -> tuple[TextGenerator, str]:
    """Make a plan's generator, and name its device in words. It is the engine's, or the suite's own where the suite
    does not generate text. load: returns the plan's model.
    """
    from evictbench.generation.generator import Generator

    settings, suite_generator = plan.settings, plan.checked.suite.generator
    if suite_generator is not None:
        generator = suite_generator(plan, load)
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
        ends=plan.end_tokens.ids,
        recency=plan.checked.recency,
    )
    return engine, machine.device_names(model)


def _generate(
    plan: RunPlan,
    folder: run_folder.RunFolder,
    todo: Sequence[PlannedSample],
    watcher: Watcher,
    make_generator: MakeGenerator,
) -> None:
    watcher.phase("loading the weights")
    generator, device = make_generator(plan)
    unused = load.unused_tensors(plan.source)
    if unused is not None and plan.weights is not None:
        unused = unused.without(plan.weights.of_model)
    session: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine.versions(),
        "commit": machine.commit(),
        "device": device,
        "batch_size": plan.settings.batch_size,
        "chat_template": None if plan.template is None else plan.template.record,
        "end_tokens": plan.end_tokens.record,
    }
    if unused is not None:
        session["unused_weights"] = unused.record
        watcher.warn(unused.sentence)
    for sentence in folder.start_session(session):
        watcher.warn(sentence)
    asked = {planned.key for planned in plan.prompts}
    finished = [line for key, line in folder.samples.items() if key in asked]
    watcher.start(finished, len(plan.prompts))
    by_key = {planned.key: planned for planned in todo}
    with closing(_completions(plan, generator, todo)) as completions, _not_finite(plan, folder):
        for completion in completions:
            planned = by_key[_key(completion)]
            _check_occupancy(plan, folder, planned, completion)
            line = _line(plan, planned, completion)
            folder.append(line)
            watcher.sample(line)


@contextmanager
def _not_finite(plan: RunPlan, folder: run_folder.RunFolder) -> Iterator[None]:
    """Name the sample whose logits are not finite, and what is kept."""
    try:
        yield
    except NotFinite as error:
        key = error.key
        if isinstance(key, tuple) and isinstance(key[0], tuple):  # one of several choices of a sample
            key = key[0]
        task, doc_id, repeat = key if isinstance(key, tuple) else ("", key, 0)
        raise RunFailed(
            f"{plan.model} under {plan.checked.chosen.label} gave logits that are not finite, NaN or infinite, after "
            f"{error.tokens} tokens of an answer ({task}, sample {doc_id}, repeat {repeat}): the weights, the dtype "
            f"({plan.dtype}) or the policy is at fault, and that sample is not kept. "
            f"{len(folder.samples)} finished samples are in {folder.path}."
        ) from error


def _completions(
    plan: RunPlan, generator: TextGenerator, todo: Sequence[PlannedSample]
) -> Generator[Completion, None, None]:
    from evictbench.generation.generator import Request

    requests = (
        Request(
            key=planned.key,
            prompt=tuple(planned.prompt.ids),
            border=planned.prompt.border,
            max_new_tokens=planned.max_new_tokens,
            stop=planned.prompt.stop,
            ends=planned.prompt.ends,
            min_new_tokens=planned.prompt.min_new_tokens,
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


def _line(plan: RunPlan, planned: PlannedSample, completion: Completion) -> dict[str, Any]:
    """The record of one sample. Times in seconds, sizes in bytes."""
    prompt = planned.prompt
    answer, graded = _graded(plan, planned, completion)
    by_position = getattr(completion, "by_position", None)
    return {
        "task": prompt.task,
        "doc_id": prompt.doc_id,
        "repeat": planned.repeat,
        "score": graded.score,
        "metrics": graded.metrics,
        **({} if by_position is None else {"by_position": by_position}),
        "answer": graded.answer,
        "thinking": answer.thought,
        "text": completion.text,
        "tokens": list(completion.tokens),
        "output_tokens": len(completion.tokens),
        "token_limit": planned.max_new_tokens,
        "truncated": completion.truncated or answer.thought == "unclosed",
        "repetition": repeats_itself(completion.tokens),
        "prompt_tokens": len(prompt.ids),
        "border": prompt.border,
        "prompt_hash": run_folder.hash_ids(prompt.ids),
        "prompt_ids": run_folder.pack_ids(prompt.ids) if len(prompt.ids) <= run_folder.MOST_IDS else None,
        "occupancy_max": completion.occupancy_max,
        "occupancy_mean": completion.occupancy_mean,
        "cache_bytes": completion.cache_bytes,
        "prefill_peak_bytes": completion.prefill_peak_bytes,
        "prefill_seconds": completion.prefill_seconds,
        "first_token_seconds": completion.first_token_seconds,
        "decode_seconds": completion.decode_seconds,
        "decode_steps": completion.decode_steps,
        **_recency(plan, completion),
    }


def _recency(plan: RunPlan, completion: Completion) -> dict[str, Any]:
    """How recent what was kept was: nothing where nobody asked, or where no step was decoded."""
    window, count = plan.checked.recency, getattr(completion, "recency", None)
    if window is None or count is None:
        return {}
    shares = count.shares()
    return {
        "recency": {
            "version": RECENCY_VERSION,
            "window": str(window.length),
            "every": window.every,
            "moments": count.moments,
            "share": float(shares.nanmean()),
            "by_layer": _rounded(shares.nanmean(-1).tolist()),
        },
        "recency_by_head": [_rounded(layer) for layer in shares.tolist()],
    }


def _rounded(shares: Sequence[float]) -> list[float | None]:
    """Shares to four digits, NaN as None."""
    return [None if share != share else round(share, 4) for share in shares]


def _graded(plan: RunPlan, planned: PlannedSample, completion: Completion) -> tuple[Answer, tasks.GradedAnswer]:
    """A completion's answer after its thought, and its grade: by the generator itself where it grades, else by the
    task. An unclosed thought scores 0, whatever the task makes of an empty text."""
    own_score = getattr(completion, "score", None)
    if own_score is not None:
        metrics = dict(getattr(completion, "metrics", {}))
        return Answer(completion.text, "none"), tasks.GradedAnswer(float(own_score), metrics)
    prompt = planned.prompt
    answer = strip_thought(completion.text, prompt.thinking.opened)
    graded = tasks.score(plan.tasks[prompt.task], prompt.doc_id, answer.text)
    if answer.thought == "unclosed":
        metrics = {**graded.metrics, tasks.METRIC: 0.0}
        graded = tasks.GradedAnswer(0.0, metrics, None if graded.answer is None else "")
    return answer, graded


def _check_occupancy(
    plan: RunPlan, folder: run_folder.RunFolder, planned: PlannedSample, completion: Completion
) -> None:
    """Raise RunFailed if a decode query saw more entries than the budget allows."""
    budget = plan.checked.budget
    if budget is None or not plan.policy.enforces_budget:
        return
    allowed = budget.at(planned.compressible, len(planned.prompt.ids) + len(completion.tokens))
    # Where heads keep different numbers of entries, the budget bounds their mean.
    seen = completion.occupancy_mean if isinstance(plan.policy, PagedPolicy) else completion.occupancy_max
    if seen > allowed:
        raise RunFailed(
            f"{plan.checked.chosen.label} let a decode query see {seen:g} entries where the budget "
            f"allows {allowed} ({planned.prompt.task}, sample {planned.prompt.doc_id}); this is a fault of the policy "
            f"or of the engine, and that sample is not kept. {len(folder.samples)} finished samples are in "
            f"{folder.path}."
        )


def _check_same_prompts(plan: RunPlan, folder: run_folder.RunFolder) -> None:
    """Raise UserError unless the finished samples were made from the prompts that this command makes now."""
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


def _warnings(plan: RunPlan) -> Iterator[str]:
    yield from plan.prepared.warnings
    yield from plan.template_warnings
    if plan.checked.budget is not None:
        yield from plan.policy.doubts(plan.checked.budget)
    for name, count in plan.answers_cut.items():
        yield (
            f"{count} of {plan.documents[name]} answers of {name} may be shorter than its card allows "
            f"(--max-new-tokens {plan.settings.max_new_tokens}, window of {plan.model}): not the card's protocol."
        )
    for name, left_out in plan.overlong.items():
        count = len(left_out)
        total = count + plan.documents[name]
        yield (
            f"{count} of {total} prompts of {name} do not fit the window of {plan.model} with their answers and are "
            "left out (--skip-overlong): its score is over the others."
        )


def _unmeasured(plan: RunPlan, folder: run_folder.RunFolder) -> Iterator[str]:
    """What --recency has not measured."""
    if plan.checked.recency is None:
        return
    window = str(plan.checked.recency.length)
    keys = [planned.key for planned in plan.prompts if planned.key in folder.samples]
    without = sum(folder.samples[key].get("recency", {}).get("window") != window for key in keys)
    if without:
        yield (
            f"{without} of {len(keys)} samples have no share of kept entries inside the window {window}: they were "
            "finished before it was asked for, or no step of theirs was decoded. --out with another folder makes all "
            "of them again."
        )


def _unused_weights(folder: run_folder.RunFolder) -> list[str]:
    """What the folder's sessions say about tensors that the model had no place for."""
    records = [session["unused_weights"] for session in folder.run["sessions"] if "unused_weights" in session]
    return list(dict.fromkeys(UnusedTensors(record["count"], tuple(record["first"])).sentence for record in records))


def _summary(plan: RunPlan, folder: run_folder.RunFolder, doubts: Sequence[str]) -> dict[str, Any]:
    return {
        "fingerprint": folder.run["fingerprint"],
        "folder": str(folder.path),
        "identity": plan.fingerprint,
        "skipped": dict(plan.prepared.skipped),
        "answers_cut": dict(plan.answers_cut),
        "overlong": {name: list(ids) for name, ids in plan.overlong.items()},
        "transferred_from": None if plan.weights is None else plan.weights.transferred_from,
        "differs": {name: {"used": used, "protocol": own} for name, (used, own) in plan.differs.items()},
        "warnings": [*_warnings(plan), *_unused_weights(folder), *doubts],
        # Read from the disk: Ctrl-C may come between writing a sample's line and counting it.
        **summarise(run_folder.read_samples(folder.path).values(), plan.asked, plan.settings.at),
    }
