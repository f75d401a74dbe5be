"""Log-likelihood tasks of lm-eval in a run: the choices of every document are scored under the policy, then graded.

With a dense prefill, the first token of a choice is predicted before anything is evicted. Choices of one token (MMLU's
letters) then score as under the full cache, whatever the policy; under `--prefill bounded` the budget matters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evictbench.generation.generator import Completion
from evictbench.generation.loglikelihood import Choice, ChoiceScorer, ScoredChoice
from evictbench.harness.prompts import grade
from evictbench.models import machine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.evaluation.plan import RunPlan
    from evictbench.generation.generator import Request


@dataclass(frozen=True, kw_only=True)
class ScoredDocument(Completion):
    """A document's choices, scored. text: the likeliest choice. tokens: those of the longest choice.

    Times and steps are sums over the choices, sizes are the largest of them. score, metrics: the task's own.
    """

    score: float
    metrics: dict[str, float]


class LoglikelihoodGenerator:
    """Scores the choices of every request's document. device: the model's, in words."""

    def __init__(self, plan: RunPlan, model: PreTrainedModel):
        settings = plan.settings
        self.device = machine.device_names(model)
        self._documents = {name: task.task_docs for name, task in plan.tasks.items()}
        self._scorer = ChoiceScorer(
            model,
            plan.policy,
            plan.checked.budget,
            prefill=settings.prefill,
            chunk=settings.chunk,
            batch_size=settings.batch_size,
        )

    def run(self, requests: Iterable[Request]) -> Iterator[ScoredDocument]:
        """Score and grade every request. Results come as they finish, in any order."""
        scored: dict[Hashable, dict[int, ScoredChoice]] = {}
        for choice in self._scorer.run(self._choices(requests)):
            assert isinstance(choice.key, tuple)
            key, number = choice.key
            scored.setdefault(key, {})[number] = choice
            doc = self._doc(key)
            if len(scored[key]) == len(doc["choices"]):
                by_number = scored.pop(key)
                yield _scored_document(key, doc, [by_number[number] for number in range(len(by_number))])

    def _choices(self, requests: Iterable[Request]) -> Iterator[Choice]:
        for request in requests:
            pairs = enumerate(self._doc(request.key)["choices"])
            for number, (context, continuation) in sorted(pairs, key=lambda pair: pair[1][0]):
                yield Choice((request.key, number), tuple(context), tuple(continuation))

    def _doc(self, key: Hashable) -> Mapping[str, Any]:
        assert isinstance(key, tuple)
        doc: Mapping[str, Any] = self._documents[key[0]][key[1]]
        return doc


def _scored_document(key: Hashable, doc: Mapping[str, Any], choices: Sequence[ScoredChoice]) -> ScoredDocument:
    metrics = grade(doc, [(choice.logprob, choice.greedy) for choice in choices])
    best = max(range(len(choices)), key=lambda number: choices[number].logprob)
    steps = sum(choice.decode_steps for choice in choices)
    longest: list[int] = max((continuation for _, continuation in doc["choices"]), key=len)
    return ScoredDocument(
        key=key,
        tokens=tuple(longest),
        text=doc["texts"][best],
        truncated=False,
        occupancy_max=max(choice.occupancy_max for choice in choices),
        occupancy_mean=sum(choice.occupancy_mean * choice.decode_steps for choice in choices) / steps if steps else 0.0,
        cache_bytes=max(choice.cache_bytes for choice in choices),
        prefill_peak_bytes=max(choice.prefill_peak_bytes for choice in choices),
        prefill_seconds=sum(choice.prefill_seconds for choice in choices),
        first_token_seconds=sum(choice.prefill_seconds for choice in choices),
        decode_seconds=sum(choice.decode_seconds for choice in choices),
        decode_steps=steps,
        score=metrics["score"],
        metrics=metrics,
    )
