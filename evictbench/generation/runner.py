"""A model under a policy and a budget: makes caches, reads prompts into them in chunks, feeds them tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.new_cache import new_cache
from evictbench.cache.probe import cache_argument
from evictbench.cache.rows import RecencyCount
from evictbench.errors import UserError
from evictbench.generation.dense_run import Everything, watch_dense_run
from evictbench.generation.recency import RecencyWindow
from evictbench.policy.base import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.base import KVCache
    from evictbench.policy.base import BasePolicy
    from evictbench.policy.budget import Budget
    from evictbench.policy.declarations import Prefill


@dataclass(frozen=True)
class Costs:
    """The costs of one row of a decode cache.

    occupancy_max, occupancy_mean: entries that its queries saw, 0 if it had none. cache_bytes: its part of the cache.
    recency: how recent what it kept was, where that was counted.
    """

    occupancy_max: int = 0
    occupancy_mean: float = 0.0
    cache_bytes: int = 0
    recency: RecencyCount | None = None

    @classmethod
    def of(cls, cache: KVCache | None, row: int) -> Costs:
        """The costs of a row that has ended. cache: None for a row that ended before it came into a decode cache."""
        if cache is None:
            return cls()
        seen = cache.rows[row].occupancy
        mean = seen.total / seen.steps if seen.steps else 0.0
        return cls(seen.largest, mean, cache.row_bytes(row), cache.rows[row].recency)


class ModelRunner:
    """Runs a model under a policy.

    budget: None for a policy without one. prefill: "native", "dense" or "bounded". chunk: tokens of a forward pass over
    a prompt. find_labels, write_on: the labels of a text under a policy that `needs_labels`, and the answer that a
    dense run gives; whoever runs the same texts again may put functions in their place that remember them. recency: the
    window by which it is counted how recent the kept entries are, in decode; None: nobody wants to know.
    Raises UserError for an impossible chunk; making a cache raises it for an impossible budget.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: BasePolicy,
        budget: Budget | None,
        *,
        prefill: Prefill = "native",
        chunk: int = 512,
        recency: RecencyWindow | None = None,
    ) -> None:
        if chunk < 1:
            raise UserError(f"A chunk has 1 token or more, not {chunk}.")
        self.model = model
        self.policy = policy
        self.budget = budget
        self.prefill_mode: Prefill = prefill
        self.chunk = chunk
        self.recency = recency
        self.find_labels: Callable[[Policy, Sequence[int]], list[Tensor]] = lambda policy, tokens: policy.labels(
            partial(watch_dense_run, model, tokens)
        )
        self.write_on: Callable[[Sequence[int], int], Sequence[int]] = partial(write_on, model)
        self.cache_argument = cache_argument(model)

    def new_cache(self, *, prompt_length: int | None = None, rows: int | None = None) -> KVCache:
        """A cache under this policy and budget; arguments as of `KVCache`."""
        return new_cache(
            self.model,
            self.policy,
            self.budget,
            prefill=self.prefill_mode,
            prompt_length=prompt_length,
            rows=rows,
        )

    def chunks(self, length: int, border: int | None) -> Iterator[tuple[int, int]]:
        """Where the forward passes of a prompt begin and end: chunks up to the border, what follows it in one.

        A policy that `reads_whole` gets one chunk, however long."""
        end = border if border and border < length else length
        whole = self.budget is not None and self.policy.reads_whole(self.prefill_mode)
        bounds = [*range(0, end, end if whole else self.chunk), end, *([length] if end < length else [])]
        return itertools.pairwise(bounds)

    def prompt_cache(
        self, prompt: Sequence[int], border: int | None, following: Sequence[int] | None = None
    ) -> KVCache:
        """A cache for one prompt. border: where the prompt is cut for good; None: at its end.

        following: the tokens that will be fed after it, for a policy that `needs_labels`; None: they are not known yet.
        """
        length = len(prompt)
        cache = self.new_cache(prompt_length=border if border and border < length else length)
        policy = self.policy
        if isinstance(policy, Policy) and policy.needs_labels:
            answer = self.write_on(prompt, policy.lookahead) if following is None else following
            known = length + len(following or ())
            cache.set_labels([labels[:, :known] for labels in self.find_labels(policy, [*prompt, *answer])])
        return cache

    def prefill(self, prompt: Sequence[int], border: int | None = None) -> tuple[KVCache, Tensor]:
        """Read a prompt. Returns its cache, and the logits `[vocabulary]` after its last token."""
        if not prompt:
            raise UserError("A prompt has no tokens.")
        cache = self.prompt_cache(prompt, border)
        for start, stop in self.chunks(len(prompt), border):
            logits = self.forward(cache, [list(prompt[start:stop])], [start])
        return cache, logits[0, -1]

    def forward(self, cache: KVCache, tokens: list[list[int]], starts: Sequence[int], keep: int = 1) -> Tensor:
        """One forward pass. Returns logits `[rows, keep, vocabulary]`.

        tokens: equally many for every row. starts: the position of each row's first one. keep: the number of last
        tokens whose logits are wanted, 0 for all.
        """
        device = self.model.device
        decodes = cache.prompt_done and len(tokens[0]) == 1
        input_ids = torch.tensor(tokens, device=device)
        position_ids = torch.tensor(starts, device=device)[:, None] + torch.arange(input_ids.shape[1], device=device)
        output = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=keep,
            **{self.cache_argument: cache},
        )
        if decodes and self.recency is not None:
            self.recency.count(cache)
        logits: Tensor = output.logits
        return logits


def write_on(
    model: PreTrainedModel,
    prompt: Sequence[int],
    most: int,
    runner: ModelRunner | None = None,
    ends: Collection[int] | None = None,
) -> list[int]:
    """The model's greedy answer to a prompt with nothing evicted: at most `most` tokens, without the end token.

    runner: one for the full cache, if there is one. ends: tokens that end an answer; None: those that the model states.
    """
    if most < 1:
        return []
    runner = runner or ModelRunner(model, Everything(), None)
    if ends is None:
        stated = getattr(model.generation_config, "eos_token_id", None)
        ends = stated if isinstance(stated, list) else [] if stated is None else [stated]
    written: list[int] = []
    with torch.no_grad():
        cache, logits = runner.prefill(prompt)
        while (token := int(logits.argmax())) not in ends:
            written.append(token)
            if len(written) == most:
                break
            logits = runner.forward(cache, [[token]], [len(prompt) + len(written) - 1])[0, -1]
    return written
