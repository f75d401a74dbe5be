"""Log-likelihood tasks of lm-eval in a run: every document's choices scored under the policy, then graded.

Where the prompt is prefilled dense, the first token of a choice is predicted before anything is evicted, so choices of
one token (MMLU's letters) are the full cache's whatever the policy: `--prefill bounded` makes them feel the budget.
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

    from evictbench.evaluation.plan import Plan
    from evictbench.generation.generator import Request


@dataclass(frozen=True, kw_only=True)
class Chosen(Completion):
    """A document's choices, scored. text: the likeliest choice. tokens: the longest one's, the most that was fed.

    Costs are sums over its choices, sizes the largest. score and metrics are the task's own.
    """

    score: float
    metrics: dict[str, float]


class ChoiceGenerator:
    """Scores the choices of every request's document. device: that of the model, in words."""

    def __init__(self, plan: Plan, model: PreTrainedModel):
        settings = plan.settings
        self.device = machine.device_of(model)
        self._documents = {name: task.task_docs for name, task in plan.tasks.items()}
        self._scorer = ChoiceScorer(
            model,
            plan.policy,
            plan.checked.budget,
            prefill=settings.prefill,
            chunk=settings.chunk,
            batch_size=settings.batch_size,
        )

    def run(self, requests: Iterable[Request]) -> Iterator[Chosen]:
        """Score and grade every request; results come as they finish, in any order."""
        scored: dict[Hashable, dict[int, ScoredChoice]] = {}
        for one in self._scorer.run(self._choices(requests)):
            assert isinstance(one.key, tuple)
            key, number = one.key
            scored.setdefault(key, {})[number] = one
            doc = self._doc(key)
            if len(scored[key]) == len(doc["choices"]):
                found = scored.pop(key)
                yield _chosen(key, doc, [found[number] for number in range(len(found))])

    def _choices(self, requests: Iterable[Request]) -> Iterator[Choice]:
        for request in requests:
            pairs = enumerate(self._doc(request.key)["choices"])
            for number, (context, continuation) in sorted(pairs, key=lambda pair: pair[1][0]):
                yield Choice((request.key, number), tuple(context), tuple(continuation))

    def _doc(self, key: Hashable) -> Mapping[str, Any]:
        assert isinstance(key, tuple)
        doc: Mapping[str, Any] = self._documents[key[0]][key[1]]
        return doc


def _chosen(key: Hashable, doc: Mapping[str, Any], scored: Sequence[ScoredChoice]) -> Chosen:
    metrics = grade(doc, [(one.logprob, one.greedy) for one in scored])
    best = max(range(len(scored)), key=lambda number: scored[number].logprob)
    steps = sum(one.decode_steps for one in scored)
    longest: list[int] = max((continuation for _, continuation in doc["choices"]), key=len)
    return Chosen(
        key=key,
        tokens=tuple(longest),
        text=doc["texts"][best],
        truncated=False,
        occupancy_max=max(one.occupancy_max for one in scored),
        occupancy_mean=sum(one.occupancy_mean * one.decode_steps for one in scored) / steps if steps else 0.0,
        cache_bytes=max(one.cache_bytes for one in scored),
        prefill_peak_bytes=max(one.prefill_peak_bytes for one in scored),
        prefill_seconds=sum(one.prefill_seconds for one in scored),
        first_token_seconds=sum(one.prefill_seconds for one in scored),
        decode_seconds=sum(one.decode_seconds for one in scored),
        decode_steps=steps,
        score=metrics["score"],
        metrics=metrics,
    )
