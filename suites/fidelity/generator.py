"""The suite's generator: for each request it compares the full cache with the evicted one, teacher-forced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from evictbench.generation.fidelity import Comparison, Measured, Text
from evictbench.models import machine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.evaluation.plan import RunPlan
    from evictbench.generation.generator import Request


class TeacherForced:
    """Feeds every prompt its document's continuation and measures it by `comparison`. device: the model's, in words."""

    def __init__(self, plan: RunPlan, model: PreTrainedModel):
        settings = plan.settings
        self.device = machine.device_names(model)
        self._documents = {name: task.task_docs for name, task in plan.tasks.items()}
        self.comparison = Comparison(
            model,
            plan.policy,
            plan.checked.budget,
            prefill=settings.prefill,
            chunk=settings.chunk,
            batch_size=settings.batch_size,
            recency=plan.checked.recency,
        )

    def run(self, requests: Iterable[Request]) -> Iterator[Measured]:
        """Measure every request. Results come as they finish, in any order."""
        return self.comparison.run(self._text(request) for request in requests)

    def _text(self, request: Request) -> Text:
        assert isinstance(request.key, tuple)
        task, doc_id = request.key[:2]
        continuation = self._documents[task][doc_id]["continuation_ids"][: request.max_new_tokens]
        return Text(request.key, request.prompt, tuple(continuation), request.border)
