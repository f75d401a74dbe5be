"""Making the tasks of a request ready: those that fit the context, those that do not, and the data that they use."""

from __future__ import annotations

from functools import cached_property

from evictbench.errors import UserError
from evictbench.suite import PreparedSuite, SuiteRequest
from evictbench.suite.datasets import Unavailable
from evictbench.suite.tasks import prepare_each, task_names

from . import haystack, hub, wordlists
from .documents import Maker, Samples
from .fit import Meter
from .haystack import Essay
from .niah import NeedleTask
from .qa import QuestionTask
from .qa_data import Corpus, Dataset, find
from .seeds import draws
from .tasks import (
    DEFAULT_CONTEXT,
    DEFAULT_LIMIT,
    TASKS,
    VERSION,
    VERSIONS,
    CommonWords,
    FrequentWords,
    Needles,
    Questions,
    Settings,
    Tracking,
    Version,
)
from .tracking import TrackingTask
from .words import CommonWordsTask, FrequentWordsTask

_PROBES = 16  # drafts whose least haystack is measured to find a task's least length


def prepare(request: SuiteRequest) -> PreparedSuite:
    """Make the tasks of a request ready; see evictbench.suite.spec.Suite for what may be raised."""
    names = task_names(request, "RULER", TASKS, TASKS)
    context = request.context or DEFAULT_CONTEXT
    limit = request.limit or DEFAULT_LIMIT
    if context < 1 or limit < 1:
        raise UserError(f"The context and the number of samples must be at least 1, not {min(context, limit)}.")
    if request.data_dir and not request.data_dir.is_dir():
        raise UserError(f"The data folder {request.data_dir} does not exist.")

    number = request.version or str(VERSION)
    version = VERSIONS[number]
    sources = _Sources(request)
    samples, skipped = prepare_each(
        request, "RULER", names, lambda name: _samples(name, version, sources, context, limit, request.seed)
    )
    return PreparedSuite(
        tasks=tuple(samples),
        metadata={"ruler_samples": samples, "version": int(number)},
        skipped=skipped,
        data={"ruler": version.name, **sources.named(samples)},
    )


class _Sources:
    """The data that tasks are made of, each read when first needed."""

    def __init__(self, request: SuiteRequest):
        self._request = request
        self._corpora: dict[Dataset, Corpus] = {}
        self.meter = Meter(request.tokenizer, request.chat)

    @cached_property
    def essay(self) -> Essay:
        path = self._request.haystack
        if path is None:
            return haystack.own_prose(self.meter)
        if path == haystack.HUB and not path.exists():
            essays = hub.essays()
            if isinstance(essays, str):
                raise UserError(f"The hub's essays cannot be had ({essays}); give a text file as haystack.")
            return haystack.from_text(essays.name, "\n".join(essays.records), self.meter)
        return haystack.from_path(path, self.meter)

    def corpus(self, dataset: Dataset) -> Corpus:
        if dataset not in self._corpora:
            self._corpora[dataset] = find(dataset, self._request.data_dir)
        return self._corpora[dataset]

    def named(self, tasks: dict[str, Samples]) -> dict[str, str]:
        """Name to hash or version of each input that these tasks use."""
        used: dict[str, str] = {}
        for settings in (TASKS[name].settings for name in tasks):
            if isinstance(settings, Questions):
                used[settings.dataset] = self.corpus(settings.dataset).name
            elif isinstance(settings, CommonWords) or (isinstance(settings, Needles) and settings.key == "words"):
                used["wonderwords"] = wordlists.version()
            if isinstance(settings, Needles) and settings.haystack == "essay":
                used["haystack"] = self.essay.name
        return used


def _samples(name: str, version: Version, sources: _Sources, context: int, limit: int, seed: int) -> Samples:
    """A task's samples. Raises Unavailable where the context is too small for them, or their data is missing."""
    task = TASKS[name]
    room = max(1, context - task.answer_tokens)
    maker = _maker(task.settings, version, sources, context, room)
    probes = [maker.draft(i, draws(name, 0, f"probe {i}")) for i in range(_probes(maker))]
    counts = sources.meter.prompts([probe.render(probe.least) for probe in probes])
    base = sum(n - probe.cost(probe.least) for n, probe in zip(counts, probes, strict=True)) / len(probes)
    least = (maker.least_room() if isinstance(maker, QuestionTask) else max(counts)) + task.answer_tokens
    if context < least:
        raise Unavailable(f"{name} needs a context of at least {least} tokens with this tokenizer, not {context}.")
    numbers: list[int] | range = range(limit)
    if isinstance(maker, QuestionTask):
        if not maker.fills():
            raise Unavailable(f"{name}: the documents of {maker.corpus.source} cannot fill a context of {context}.")
        numbers = maker.questions_that_fit(limit)
    return Samples(name, maker, sources.meter, context, task.answer_tokens, base, seed, numbers)


def _maker(settings: Settings, version: Version, sources: _Sources, context: int, room: int) -> Maker:
    meter = sources.meter
    if isinstance(settings, Needles):
        return NeedleTask(settings, meter, room, sources.essay if settings.haystack == "essay" else None)
    if isinstance(settings, Tracking):
        return TrackingTask(settings, version.tracking, meter, room)
    if isinstance(settings, CommonWords):
        return CommonWordsTask(settings, meter, context, room)
    if isinstance(settings, FrequentWords):
        return FrequentWordsTask(settings, meter, context if version.answer_counts else room, room)
    return QuestionTask(sources.corpus(settings.dataset), meter, room)


def _probes(maker: Maker) -> int:
    return min(_PROBES, len(maker.corpus.questions)) if isinstance(maker, QuestionTask) else _PROBES
