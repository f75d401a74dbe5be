"""The log-probability of given continuations under a policy: a prompt is prefilled once, and each of its
continuations is fed token by token from a copy of that cache."""

from __future__ import annotations

import inspect
import itertools
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from evictbench.cache import EvictionCache
from evictbench.errors import UserError
from evictbench.rows import admit, release

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.budget import Budget
    from evictbench.policy import Policy


@dataclass(frozen=True)
class Choice:
    """A prompt and one continuation of it, both of at least one token. Choices of one prompt stand side by side."""

    key: Hashable
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class ScoredChoice:
    """logprob: of the whole continuation, in nats. greedy: each of its tokens is the most likely one.

    The costs are those of a completion; prefill_seconds are its share of a prompt that several choices have.
    """

    key: Hashable
    logprob: float
    greedy: bool
    occupancy_max: int
    occupancy_mean: float
    cache_bytes: int
    prefill_peak_bytes: int
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int


@dataclass
class _Prompt:
    """A prefilled prompt: its cache, and the log-probabilities `[vocabulary]` of what follows."""

    cache: EvictionCache
    following: Tensor
    likeliest: int
    seconds: float


@dataclass
class _Row:
    choice: Choice
    logprob: float
    greedy: bool
    peak: int
    prefill_seconds: float
    fed: int = 0
    decode_seconds: float = 0.0

    @property
    def ended(self) -> bool:
        return self.fed == len(self.choice.continuation) - 1


class ChoiceScorer:
    """Scores choices under a policy; arguments as of `evictbench.generation.Generator`.

    Raises UserError for an impossible budget and for a choice without tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        budget: Budget | None,
        *,
        prefill: Literal["native", "dense", "bounded"] = "native",
        chunk: int = 512,
        batch_size: int = 8,
    ) -> None:
        if chunk < 1 or batch_size < 1:
            raise UserError(f"A chunk and a batch have 1 or more, not {min(chunk, batch_size)}.")
        self.model = model
        self.policy = policy
        self.budget = budget
        self.prefill = prefill
        self.chunk = chunk
        self.batch_size = batch_size
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def run(self, choices: Iterable[Choice]) -> Iterator[ScoredChoice]:
        """Score every choice; results come as they finish, in any order."""
        coming = (list(group) for _, group in itertools.groupby(choices, key=lambda choice: choice.prompt))
        again: deque[list[Choice]] = deque()
        group: list[Choice] = []
        waiting: deque[Choice] = deque()
        prompt: _Prompt | None = None
        active: list[_Row] = []
        cache: EvictionCache | None = None
        while True:
            try:
                while len(active) < self.batch_size:
                    if not waiting:
                        prompt, group = None, again.popleft() if again else next(coming, [])
                        if not group:
                            break
                        waiting = deque(group)
                    if prompt is None:
                        prompt = self._prefill(group)
                    row = self._row(waiting[0], prompt, len(group))
                    if not row.ended:
                        if cache is None:
                            cache = self._new_cache(rows=self.batch_size)
                        admit(cache, prompt.cache)
                        active.append(row)
                    waiting.popleft()
                    if row.ended:
                        yield self._scored(row, None, 0)
                if not active or cache is None:
                    return
                self._step(active, cache)
            except torch.OutOfMemoryError:
                if not active:
                    raise
                # A step that failed half-way has left some layers ahead of others: start these rows again.
                unfinished = sorted([*(row.choice for row in active), *waiting], key=lambda choice: choice.prompt)
                again.extend(list(same) for _, same in itertools.groupby(unfinished, key=lambda choice: choice.prompt))
                self.batch_size = max(1, len(active) // 2)
                active, cache, prompt, waiting = [], None, None, deque()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                continue
            for index in range(len(active) - 1, -1, -1):
                if active[index].ended:
                    yield self._scored(active[index], cache, index)
                    release(cache, index)
                    active[index] = active[-1]
                    active.pop()

    def _new_cache(self, *, prompt_length: int | None = None, rows: int | None = None) -> EvictionCache:
        return EvictionCache(
            self.model, self.policy, self.budget, prefill=self.prefill, prompt_length=prompt_length, rows=rows
        )

    def _prefill(self, group: Sequence[Choice]) -> _Prompt:
        tokens = group[0].prompt
        if not tokens or not all(choice.continuation for choice in group):
            raise UserError("A context and each of its continuations have at least one token.")
        started = time.perf_counter()
        cache = self._new_cache(prompt_length=len(tokens))
        for start in range(0, len(tokens), self.chunk):
            logits = self._forward(cache, [list(tokens[start : start + self.chunk])], [start])
        following = logits[0].float().log_softmax(-1)
        likeliest = int(following.argmax())
        return _Prompt(cache, following, likeliest, time.perf_counter() - started)

    @staticmethod
    def _row(choice: Choice, prompt: _Prompt, sharing: int) -> _Row:
        first = choice.continuation[0]
        return _Row(
            choice,
            logprob=float(prompt.following[first]),
            greedy=first == prompt.likeliest,
            peak=prompt.cache.bytes_peak,
            prefill_seconds=prompt.seconds / sharing,
        )

    def _step(self, active: Sequence[_Row], cache: EvictionCache) -> None:
        """Feed every row the next token of its continuation, and read how likely the one after it is."""
        started = time.perf_counter()
        logits = self._forward(cache, [[row.choice.continuation[row.fed]] for row in active], cache.seen)
        wanted = torch.tensor([row.choice.continuation[row.fed + 1] for row in active], device=logits.device)
        logprobs = logits.float().log_softmax(-1).gather(-1, wanted[:, None])[:, 0].tolist()
        greedy = (logits.argmax(-1) == wanted).tolist()
        share = (time.perf_counter() - started) / len(active)
        for row, logprob, likeliest in zip(active, logprobs, greedy, strict=True):
            row.fed += 1
            row.logprob += logprob
            row.greedy = row.greedy and likeliest
            row.decode_seconds += share

    def _forward(self, cache: EvictionCache, tokens: list[list[int]], starts: Sequence[int]) -> Tensor:
        """Logits `[rows, vocabulary]` after the last token of each row."""
        device = self.model.device
        input_ids = torch.tensor(tokens, device=device)
        position_ids = torch.tensor(starts, device=device)[:, None] + torch.arange(input_ids.shape[1], device=device)
        output = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _scored(self, row: _Row, cache: EvictionCache | None, index: int) -> ScoredChoice:
        occupancy = cache.occupancy[index] if cache is not None else None
        return ScoredChoice(
            key=row.choice.key,
            logprob=row.logprob,
            greedy=row.greedy,
            occupancy_max=occupancy.largest if occupancy else 0,
            occupancy_mean=occupancy.total / occupancy.steps if occupancy and occupancy.steps else 0.0,
            cache_bytes=cache.nbytes() // self.batch_size if cache is not None else 0,
            prefill_peak_bytes=row.peak,
            prefill_seconds=row.prefill_seconds,
            decode_seconds=row.decode_seconds,
            decode_steps=row.fed,
        )
