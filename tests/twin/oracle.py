"""The oracle from its definition: labels by explicit loops over the probabilities of a dense run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from hypothesis import strategies as st
from transformers import PreTrainedModel

from twin.cases import Case
from twin.model import DenseModel, Forward, dense_forward
from twin.rules import Cut, Rule, choose
from twin.tiny import VOCAB, tiny_model

if TYPE_CHECKING:
    from twin.rules import Moment
    from twin.simulate import Record

Label = Literal["mean", "max"]
Shares = Literal["head", "layer", "model"]
Labels = dict[tuple[int, int], list[float]]
"""(layer, kv_head) to the label of each token of the text that the dense run read."""


def labels(model: PreTrainedModel, tokens: Sequence[int], label: Label, shares: Shares, window: int) -> Labels:
    """How much each token is looked at from `window` or more tokens behind it, as it is, without a logarithm."""
    forward, dense = dense_forward(model, tokens), DenseModel(model)
    alone = {
        (layer, kv_head): [
            max(
                future(forward, layer, kv_head * dense.group + member, token, len(tokens), label, window)
                for member in range(dense.group)
            )
            for token in range(len(tokens))
        ]
        for layer in range(dense.layers)
        for kv_head in range(dense.kv_heads)
    }
    if shares == "head":
        return alone
    together: Labels = {}
    for layer, kv_head in alone:
        partners = [key for key in alone if shares == "model" or key[0] == layer]
        together[layer, kv_head] = []
        for token in range(len(tokens)):
            found = [alone[partner][token] for partner in partners]
            together[layer, kv_head].append(max(found) if label == "max" else sum(found) / len(found))
    return together


def future(forward: Forward, layer: int, head: int, token: int, length: int, label: Label, window: int) -> float:
    """One query head's attention to one token from the queries that lie far enough behind it."""
    seen = [forward.probs[layer][head, query, token].item() for query in range(token + window, length)]
    if label == "max":
        return max(seen, default=0.0)
    return sum(seen) / max(1, length - token - window)


@dataclass(frozen=True)
class Oracle(Rule):
    """Sinks and the window stay; of the rest what has no label goes first, oldest first, then the lowest label."""

    text: tuple[int, ...]
    model: Any
    label: Label = "mean"
    shares: Shares = "head"
    sinks: int = 4
    window: int = 32

    name = "oracle"
    token_at_a_time = True

    @property
    def least_budget(self) -> int:
        return self.sinks + self.window + 1

    @property
    def labels(self) -> Labels:
        return _kept_labels(self.model, self.text, self.label, self.shares, self.window)

    def cut(self, record: Record, moment: Moment) -> list[Cut]:
        cuts = []
        for kv_head, held in enumerate(record.held[moment.layer]):
            known = self.labels[moment.layer, kv_head]
            kept, gap = list(held), math.inf
            while len(kept) + 1 > moment.budget:
                pool = [p for p in kept if p >= self.sinks and p <= moment.next_query - self.window]
                generated = [position for position in pool if position >= len(known)]
                if generated:
                    kept.remove(min(generated))
                    continue
                logarithms = {p: math.log(known[p]) if known[p] > 0 else -math.inf for p in pool}
                survivors = choose(logarithms, len(pool) - 1)
                (lost,) = set(pool) - set(survivors.kept)
                kept.remove(lost)
                if not math.isnan(survivors.gap):  # two that nothing looks at: an exact tie
                    gap = min(gap, survivors.gap)
            cuts.append(Cut(kept, gap))
        return cuts


_kept_labels = cache(labels)


@st.composite
def oracle_cases(draw: st.DrawFn) -> Case:
    """Texts, models, budgets and all the ways to run them; new tokens given, and then labelled too, or chosen."""
    length = draw(st.one_of(st.integers(20, 40), st.integers(1, 40)))
    token = st.integers(0, VOCAB - 1)
    prompt = tuple(draw(st.lists(token, min_size=length, max_size=length)))
    count = draw(st.integers(0, 12))
    given = draw(st.booleans())
    new_tokens = tuple(draw(st.lists(token, min_size=count, max_size=count))) if given else count
    kv_heads, groups = draw(st.sampled_from([(2, 2), (2, 3), (1, 4), (4, 1)]))
    shape: dict[str, Any] = {
        "kind": draw(st.sampled_from(["llama", "qwen3"])),
        "layers": draw(st.sampled_from([2, 3])),
        "kv_heads": kv_heads,
        "groups": groups,
        "tied": draw(st.booleans()),
    }
    seed = draw(st.integers(0, 3))
    rule = Oracle(
        text=prompt + new_tokens if isinstance(new_tokens, tuple) else prompt,
        model=tiny_model(seed=seed, **shape),
        label=draw(st.sampled_from(["mean", "max"])),
        shares=draw(st.sampled_from(["head", "layer", "model"])),
        sinks=draw(st.sampled_from([4, 0, 1])),
        window=draw(st.sampled_from([3, 1, 2, 8, 32])),
    )
    least = rule.least_budget
    budgets: list[st.SearchStrategy[int | float | None]] = [st.integers(least, max(least, 48))]
    budgets += [st.integers(least, 24)] if least < 24 else []
    budgets += [st.sampled_from([0.5, 0.75, 0.9, 1.0])] if least <= 32 else []
    return Case(
        rule=rule,
        model_seed=seed,
        flat=False,
        prompt=prompt,
        new_tokens=new_tokens,
        budget=draw(st.one_of(budgets)),
        prefill=draw(st.sampled_from(["native", "dense", "bounded"])),
        chunk=draw(st.integers(1, 16)),
        border=draw(st.one_of(st.none(), st.integers(1, length - 1))) if length > 1 else None,
        **shape,
    )
