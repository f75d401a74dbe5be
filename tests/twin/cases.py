"""Hypothesis strategies: a small model, a prompt, a budget and all the ways to run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hypothesis import strategies as st
from transformers import PreTrainedModel

from twin.kvpop import KVpop
from twin.rules import H2O, TOVA, Full, Random, Rule, Shares, SnapKV, StreamingLLM
from twin.simulate import Prefill, Trace, simulate
from twin.tiny import VOCAB, Kind, tiny_model

Priority = Callable[[int, int, int, int], float]

RULES = ("full", "random", "streaming_llm", "tova", "h2o", "snapkv", "kvpop", "kvpop_mlp")

NOT_SETTINGS = {"priority", "memory", "weights_seed", "equal", "waits_for_recent", "normed"}
"""Fields of a rule that are no settings of the policy: they come to it another way."""


def sample_priority(seed: int, layer: int, kv_head: int, position: int) -> float:
    """Some hash in [0, 1); a comparison puts the engine's own in its place."""
    x = (seed * 1_000_003 + layer * 8191 + kv_head * 131 + position + 1) & (2**64 - 1)
    for _ in range(2):
        x = ((x ^ (x >> 31)) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    return (x >> 11) / 2**53


@dataclass(frozen=True)
class Case:
    """All that decides a simulation."""

    rule: Rule
    kind: Kind
    model_seed: int
    layers: int
    kv_heads: int
    groups: int
    tied: bool
    flat: bool
    prompt: tuple[int, ...]
    new_tokens: int | tuple[int, ...]
    budget: int | float | None
    prefill: Prefill
    chunk: int
    border: int | None
    charged: int = 0
    beside: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """The rule's settings by name."""
        return {
            f.name: getattr(self.rule, f.name)
            for f in fields(self.rule)  # type: ignore[arg-type]
            if f.name not in NOT_SETTINGS
        }

    def model(self) -> PreTrainedModel:
        """The same object for the same description."""
        return tiny_model(
            self.kind,
            self.model_seed,
            self.layers,
            self.kv_heads,
            self.groups,
            tied=self.tied,
            flat=self.flat,
        )

    def trace(self) -> Trace:
        return simulate(
            self.model(),
            self.rule,
            self.prompt,
            self.new_tokens if isinstance(self.new_tokens, int) else list(self.new_tokens),
            self.budget,
            self.prefill,
            self.chunk,
            self.border,
            self.charged,
            self.beside,
        )


def rules(
    name: str, priority: Priority = sample_priority, shares: Sequence[Shares] = ("head",)
) -> st.SearchStrategy[Rule]:
    """A rule with settings small enough to matter on a prompt of forty tokens, the defaults among them."""
    group = st.sampled_from(["mean", "max", "sum"])
    if name == "full":
        return st.just(Full())
    if name == "tova":
        return st.just(TOVA())
    if name == "h2o":
        return st.builds(H2O, group=group, shares=st.sampled_from(shares))
    if name == "streaming_llm":
        return st.builds(
            StreamingLLM,
            sinks=st.sampled_from([4, 0, 1, 2]),
            positions=st.sampled_from(["reindexed", "original"]),
        )
    if name == "random":
        return st.builds(
            Random,
            priority=st.just(priority),
            seed=st.integers(0, 5),
            sinks=st.sampled_from([4, 0, 1]),
            recent=st.sampled_from([3, 1, 2, 8, 32]),
        )
    if name == "snapkv":
        ways = [("append", "running"), ("reselect", "running"), ("reselect", "window")]
        return st.builds(
            lambda way, **settings: SnapKV(decode=way[0], votes=way[1], **settings),
            way=st.sampled_from(ways),
            window=st.sampled_from([4, 1, 2, 3, 8, 32]),
            kernel=st.sampled_from([3, 1, 7]),
            pool=st.sampled_from(["max", "avg"]),
            group=group,
            shares=st.sampled_from(shares),
        )
    if name in ("kvpop", "kvpop_mlp"):
        return st.builds(
            KVpop,
            memory=st.just(name == "kvpop"),
            weights_seed=st.integers(0, 5),
            sinks=st.sampled_from([4, 0, 1]),
            window=st.sampled_from([3, 1, 2, 8, 32]),
            recent=st.sampled_from([0.0, 0.5, 0.7, 0.95]),
            waits_for_recent=st.booleans(),
            normed=st.booleans(),
        )
    raise ValueError(f"no rule {name!r}")


@st.composite
def cases(
    draw: st.DrawFn,
    name: str,
    priority: Priority = sample_priority,
    forced: bool | None = None,
    shares: Sequence[Shares] = ("head",),
) -> Case:
    """Cases for one rule. `forced`: whether the new tokens are given (True), chosen (False) or either (None).
    `shares`: who may share a kept set where that is a setting.

    Flat models, where all scores tie exactly, only for tova: elsewhere ties hang on the order of summation.
    """
    rule = draw(rules(name, priority, shares))
    # Half of the prompts long enough for evictions that say something.
    length = draw(st.one_of(st.integers(20, 40), st.integers(1, 40)))
    kv_heads, groups = draw(st.sampled_from([(2, 2), (2, 3), (1, 4), (4, 1)]))
    least = rule.least_budget
    budgets: list[st.SearchStrategy[int | float | None]] = [st.integers(least, max(least, 48))]
    if least < 8:
        budgets.append(st.integers(8, 20))
    if least < 24:
        budgets.append(st.integers(least, 24))
    if least <= 32 and not getattr(rule, "needs_a_number", False):
        budgets.append(st.sampled_from([0.5, 0.75, 0.9, 1.0]))
    given = draw(st.booleans()) if forced is None else forced
    token = st.integers(0, VOCAB - 1)
    new_tokens = draw(st.integers(0, 12))
    return Case(
        rule=rule,
        kind=draw(st.sampled_from(["llama", "qwen3"])),
        model_seed=draw(st.integers(0, 3)),
        layers=draw(st.sampled_from([2, 3])),
        kv_heads=kv_heads,
        groups=groups,
        tied=draw(st.booleans()),
        flat=name == "tova" and draw(st.integers(0, 4)) == 4,
        prompt=tuple(draw(st.lists(token, min_size=length, max_size=length))),
        new_tokens=tuple(draw(st.lists(token, min_size=new_tokens, max_size=new_tokens))) if given else new_tokens,
        budget=None if name == "full" else draw(st.one_of(budgets)),
        prefill=draw(st.sampled_from(["native", "dense", "bounded"])),
        chunk=draw(st.integers(1, 16)),
        border=draw(st.one_of(st.none(), st.integers(1, length - 1))) if length > 1 else None,
    )
