"""A model under a policy and a budget: makes caches, reads prompts into them in chunks, feeds them tokens."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from evictbench.cache.paged.cache import PagedCache
from evictbench.cache.slots.cache import EvictionCache
from evictbench.errors import UserError
from evictbench.generation.dense_run import Everything, watch_dense_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.policy.base import Policy
    from evictbench.policy.budget import Budget


@dataclass(frozen=True)
class Costs:
    """What one row of a decode cache took: entries that its queries saw (0 where it had none), and its bytes."""

    occupancy_max: int = 0
    occupancy_mean: float = 0.0
    cache_bytes: int = 0

    @classmethod
    def of(cls, cache: EvictionCache | None, row: int) -> Costs:
        """Of a row that has ended; None for one that ended before it came into a decode cache."""
        if cache is None:
            return cls()
        seen = cache.occupancy[row]
        return cls(seen.largest, seen.total / seen.steps if seen.steps else 0.0, cache.row_bytes(row))


class Feeder:
    """Feeds tokens to a model under a policy.

    budget: None for a policy without one. prefill: "native", "dense" or "bounded", in chunks of `chunk` tokens.
    foresee, go_on: the labels of a text by a policy that foresees, and the answer that the dense run gives; whoever
    asks for the same texts again may put something that remembers them in their place.
    Raises UserError for an impossible chunk; making a cache raises it for an impossible budget.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        budget: Budget | None,
        *,
        prefill: Literal["native", "dense", "bounded"] = "native",
        chunk: int = 512,
    ) -> None:
        if chunk < 1:
            raise UserError(f"A chunk has 1 token or more, not {chunk}.")
        self.model = model
        self.policy = policy
        self.budget = budget
        self.prefill = prefill
        self.chunk = chunk
        self.foresee: Callable[[Sequence[int]], list[Tensor]] = lambda tokens: policy.foresee(
            partial(watch_dense_run, model, tokens)
        )
        self.go_on: Callable[[Sequence[int], int], Sequence[int]] = partial(write_on, model)
        # The argument was renamed in transformers 5.24.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def new_cache(self, *, prompt_length: int | None = None, rows: int | None = None) -> EvictionCache:
        """A cache under this policy and budget."""
        kind = PagedCache if self.policy.ragged else EvictionCache
        return kind(self.model, self.policy, self.budget, prefill=self.prefill, prompt_length=prompt_length, rows=rows)

    def passes(self, length: int, border: int | None) -> Iterator[tuple[int, int]]:
        """Where the forward passes of a prompt begin and end: chunks up to the border, what follows it in one."""
        end = border if border and border < length else length
        bounds = [*range(0, end, self.chunk), end, *([length] if end < length else [])]
        return itertools.pairwise(bounds)

    def prompt_cache(
        self, prompt: Sequence[int], border: int | None, following: Sequence[int] | None = None
    ) -> EvictionCache:
        """A cache for one prompt, whose end, where it is cut for good, is the border if there is one.

        following: the tokens that will be fed after it, for a policy that foresees; None: they are not known yet.
        """
        length = len(prompt)
        cache = self.new_cache(prompt_length=border if border and border < length else length)
        if self.policy.foresees:
            own = self.go_on(prompt, self.policy.ahead) if following is None else following
            known = length + len(following or ())
            cache.foretell([labels[:, :known] for labels in self.foresee([*prompt, *own])])
        return cache

    def read(self, prompt: Sequence[int], border: int | None = None) -> tuple[EvictionCache, Tensor]:
        """Feed a prompt; its cache, and the logits `[vocabulary]` after its last token."""
        if not prompt:
            raise UserError("A prompt has no tokens.")
        cache = self.prompt_cache(prompt, border)
        for start, stop in self.passes(len(prompt), border):
            logits = self.feed(cache, [list(prompt[start:stop])], [start])
        return cache, logits[0, -1]

    def feed(self, cache: EvictionCache, tokens: list[list[int]], starts: Sequence[int], keep: int = 1) -> Tensor:
        """One forward pass. tokens: as many for every row, which begin at `starts`; keep: the last tokens whose
        logits are wanted, 0 for all. Returns `[rows, kept, vocabulary]`."""
        device = self.model.device
        input_ids = torch.tensor(tokens, device=device)
        position_ids = torch.tensor(starts, device=device)[:, None] + torch.arange(input_ids.shape[1], device=device)
        with cache.listening() if isinstance(cache, PagedCache) else nullcontext():
            output = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_argument: cache},
            )
        logits: Tensor = output.logits
        return logits


def write_on(model: PreTrainedModel, prompt: Sequence[int], most: int, feeder: Feeder | None = None) -> list[int]:
    """How the model answers a prompt, greedily and with nothing evicted: at most `most` tokens, its end left out.

    feeder: one for the full cache, if there is one.
    """
    if most < 1:
        return []
    feeder = feeder or Feeder(model, Everything(), None)
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    written: list[int] = []
    with torch.no_grad():
        cache, logits = feeder.read(prompt)
        while (token := int(logits.argmax())) not in ends:
            written.append(token)
            if len(written) == most:
                break
            logits = feeder.feed(cache, [[token]], [len(prompt) + len(written) - 1])[0, -1]
    return written
