"""One dense run over a text in place of many: what does not depend on policy or budget is computed once.

Where a prompt is attended whole and cut at its end (dense prefill), queries, keys and values are the same for every
policy and budget. They are recorded once and given to each cache through the engine's own attention function, which
writes entries, shows them to the policy and evicts as in any run; the last tokens go through the model itself. The
oracle's labels come from the same recording. Results are those of an ordinary run up to the rounding of matrix
products. The times of prompts are not, and mean nothing.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from evictbench.cache.attention import attend
from evictbench.cache.slots.cache import SlotCache
from evictbench.generation.dense_run import Everything, watch_dense_run
from evictbench.generation.runner import ModelRunner, write_on
from evictbench.policy import Policy, Prefill, Watch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.base import KVCache
    from evictbench.generation.fidelity import DensePasses
    from evictbench.policy import BasePolicy
    from evictbench.policy.budget import Budget

FED = 8
"""Tokens at the end of a prompt that go through the model, so that there is something to predict from."""

SHOWN = frozenset({"last_query_probs", "window_probs", "mass"})
"""Signals that a policy can be given from a recording."""

Tokens = tuple[int, ...]
Key = TypeVar("Key")
Made = TypeVar("Made")


@dataclass(frozen=True)
class LayerRecording:
    """A layer's query `[1, heads, tokens, head_dim]`, key and value `[1, kv_heads, tokens, head_dim]`, and scaling."""

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float


class DenseRuns:
    """Recordings of the last `keep` texts, with and without an answer, labels, and the results of dense passes.

    A recording takes 4 · layers · (heads + 2 · kv_heads) · head_dim bytes a token in float32: 115 MB for 1,000 tokens
    of SmolLM2-135M.
    """

    def __init__(self, model: PreTrainedModel, keep: int) -> None:
        self.model = model
        self.keep = keep
        self.dense_passes: DensePasses = {}
        self._recordings: OrderedDict[Tokens, list[LayerRecording]] = OrderedDict()
        self._answers: OrderedDict[tuple[Tokens, int], list[int]] = OrderedDict()
        self._labels: OrderedDict[tuple[str, Tokens], list[Tensor]] = OrderedDict()

    def recording(self, tokens: Tokens) -> list[LayerRecording]:
        """The recording of a text, layer by layer."""

        def record() -> list[LayerRecording]:
            layers: list[LayerRecording] = []

            def watch(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
                layers.append(LayerRecording(query, key, value, scaling))

            watch_dense_run(self.model, tokens, watch)
            return layers

        return _cached(self._recordings, tokens, record, 2 * self.keep)

    def write_on(self, prompt: Sequence[int], most: int) -> list[int]:
        """The full cache's answer to a prompt, `most` tokens at most."""
        text = tuple(prompt)

        def write() -> list[int]:
            runner = ReplayingRunner(
                self.model, Everything(), None, prefill="native", chunk=512, runs=self, label="everything"
            )
            return write_on(self.model, text, most, runner)

        return _cached(self._answers, (text, most), write, 4 * self.keep)

    def labels_by(self, label: str) -> Callable[[Policy, Sequence[int]], list[Tensor]]:
        """A function that finds a policy's labels of a text. label: the policy's name with its settings."""

        def find_labels(policy: Policy, tokens: Sequence[int]) -> list[Tensor]:
            text = tuple(tokens)

            def run(watch: Watch) -> None:
                for index, layer in enumerate(self.recording(text)):
                    watch(index, layer.query, layer.key, layer.value, layer.scaling)

            return _cached(self._labels, (label, text), lambda: policy.labels(run), 4 * self.keep)

        return find_labels


class ReplayingRunner(ModelRunner):
    """A `ModelRunner` that takes a densely attended prompt from its recording. label: the policy with its settings."""

    def __init__(
        self,
        model: PreTrainedModel,
        policy: BasePolicy,
        budget: Budget | None,
        *,
        prefill: Prefill,
        chunk: int,
        runs: DenseRuns,
        label: str,
    ) -> None:
        super().__init__(model, policy, budget, prefill=prefill, chunk=chunk)
        self.runs = runs
        self.find_labels = runs.labels_by(label)
        self.write_on = runs.write_on
        dense = not policy.needs_budget or policy.prefill_mode(prefill) == "dense"
        self._replays = dense and isinstance(policy, Policy) and policy.signals <= SHOWN
        self._text: Tokens = ()
        self._replayed = 0

    def prompt_cache(
        self, prompt: Sequence[int], border: int | None, following: Sequence[int] | None = None
    ) -> KVCache:
        """`ModelRunner.prompt_cache`, which also notes the text, by which its recording is found."""
        self._text = (*prompt, *(following or ()))
        return super().prompt_cache(prompt, border, following)

    def chunks(self, length: int, border: int | None) -> Iterator[tuple[int, int]]:
        """The passes of a prompt: all but the end of its dense part in one pass, that end, and the question."""
        end = border if border and border < length else length
        self._replayed = max(0, end - FED) if self._replays else 0
        if not self._replayed:
            return super().chunks(length, border)
        return itertools.pairwise([0, self._replayed, end, *([length] if end < length else [])])

    def forward(self, cache: KVCache, tokens: list[list[int]], starts: Sequence[int], keep: int = 1) -> Tensor:
        """One forward pass of the model, or one from the recording, which gives no logits: `[1, 0, 0]`."""
        if not self._replayed or cache.prompt_done or cache.seen:
            return super().forward(cache, tokens, starts, keep)
        assert isinstance(cache, SlotCache)
        no_module: Any = None
        cache.output_unread = True
        for layer, recorded in zip(cache.evicting, self.runs.recording(self._text), strict=True):
            query, key, value = (
                part[:, :, : self._replayed] for part in (recorded.query, recorded.key, recorded.value)
            )
            keys, values = layer.update(key, value)
            attend(no_module, query, keys, values, None, recorded.scaling)
        cache.output_unread = False
        return torch.empty((1, 0, 0))


def _cached(kept: OrderedDict[Key, Made], key: Key, make: Callable[[], Made], most: int) -> Made:
    """The value under a key, made if need be; only the last `most` values stay."""
    if key not in kept:
        kept[key] = make()
        while len(kept) > most:
            kept.popitem(last=False)
    return kept[key]
