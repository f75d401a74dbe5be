"""KVpop from its definitions: scores, ranking, decisions, loss. One head of one layer at a time, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu

from twin.rules import Cut, Moment, Rule, choose

if TYPE_CHECKING:
    from twin.simulate import Record


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """The scorer of one KV head. d is head_dim; `width` is 2 d without a memory and 3 d with one.

    shift, scale: [2 d]; w1: [hidden, width]; b1, w2: [hidden]; b2: number; log_gamma: number.
    With a memory: wq [d, 2 d]; input_gate, forget_gate [2 d] and their biases; norm [d], the scale of a head norm.
    """

    shift: Tensor
    scale: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    log_gamma: Tensor
    wq: Tensor | None = None
    input_gate: Tensor | None = None
    input_bias: Tensor | None = None
    forget_gate: Tensor | None = None
    forget_bias: Tensor | None = None
    norm: Tensor | None = None

    def score(self, features: Tensor) -> Tensor:
        """r of one token from [width]."""
        return self.w2 @ silu(self.w1 @ features + self.b1) + self.b2


def standardised(weights: HeadWeights, key: Tensor, value: Tensor) -> Tensor:
    """z of tokens [.., d], from their keys before RoPE and their values."""
    return (torch.cat((key, value), -1) - weights.shift) * weights.scale


def gates(weights: HeadWeights, z: Tensor) -> tuple[Tensor, Tensor]:
    """The logs of the input gates and of the forget gates of tokens [n, 2 d]."""
    assert weights.input_gate is not None
    assert weights.input_bias is not None
    assert weights.forget_gate is not None
    assert weights.forget_bias is not None
    return z @ weights.input_gate + weights.input_bias, logsigmoid(z @ weights.forget_gate + weights.forget_bias)


def memory_read(kappas: Tensor, nus: Tensor, inputs: Tensor, forgets: Tensor, query: Tensor) -> Tensor:
    """What the memory answers after these tokens: one sum over all of them, no state and no running maximum.

    C = sum_t e^(i_t + logf_(t+1) + ... + logf_u) nu_t kappa_t^T, n alike; C query / max(|n query|, 1).
    kappas, nus: [n, d]; inputs, forgets: [n]; query: [d].
    """
    memory, normaliser = torch.zeros_like(query), torch.zeros_like(query[0])
    forgotten = torch.zeros_like(query[0])
    for t in reversed(range(len(kappas))):
        weight = torch.exp(inputs[t] + forgotten) * (kappas[t] @ query)
        memory = memory + weight * nus[t]
        normaliser = normaliser + weight
        forgotten = forgotten + forgets[t]
    return memory / max(normaliser.abs().item(), 1.0)


def mlp_score(weights: HeadWeights, keys: Tensor, values: Tensor, t: int) -> Tensor:
    """r of token t; keys, values: [tokens, d], keys before RoPE."""
    return weights.score(standardised(weights, keys[t], values[t]))


def memory_score(weights: HeadWeights, keys: Tensor, values: Tensor, t: int, window: int) -> Tensor:
    """r of token t, read after token t + window - 1, or after the last one where the text ends before."""
    assert weights.wq is not None
    last = min(t + window - 1, len(keys) - 1)
    z = standardised(weights, keys[: last + 1], values[: last + 1])
    d = keys.shape[1]
    inputs, forgets = gates(weights, z)
    read = memory_read(z[:, :d] / d**0.5, z[:, d:], inputs, forgets, weights.wq @ z[t])
    if weights.norm is not None:
        centred = read - read.mean()
        read = centred / torch.sqrt((centred**2).mean() + 1e-5) * weights.norm
    return weights.score(torch.cat((z[t], read)))


# Ranking.


def aged(scores: list[float], log_gamma: float, q: int, t: int) -> float:
    """The score of token t as query q ranks it."""
    return scores[t] + (q - t) * log_gamma


def eligible(q: int, sinks: int, window: int) -> list[int]:
    """E(q)."""
    return [t for t in range(q + 1) if sinks <= t <= q - window]


def best_of_pool(scores: list[float], log_gamma: float, q: int, sinks: int, window: int, pool: int) -> list[int]:
    """The `pool` best of E(q), best first; of equals the earlier first."""
    ranked = sorted(eligible(q, sinks, window), key=lambda t: (-aged(scores, log_gamma, q, t), t))
    return ranked[:pool]


def pools_by_recursion(priorities: list[float], sinks: int, window: int, pool: int) -> list[list[int]]:
    """What is held outside sinks and window at each query: one joins, and the worst goes if it is one too many."""
    held: list[int] = []
    pools = []
    for q in range(len(priorities)):
        if sinks <= q - window:
            held.append(q - window)
        if len(held) > pool:
            held.remove(min(held, key=lambda t: (priorities[t], -t)))
        pools.append(sorted(held))
    return pools


# Loss.


@dataclass(frozen=True)
class Decision:
    """One query at which there is something to decide. keeps: whether the teacher keeps the newcomer.

    margin: by how much the teacher ranks it over the boundary (below zero: under it); delta: the same of the student.
    """

    q: int
    newcomer: int
    boundary: int
    keeps: bool
    margin: Tensor
    delta: Tensor


def decisions(teacher: Tensor, student: Tensor, sinks: int, window: int, pool: int) -> list[Decision]:
    """Of one head; teacher, student: priorities [S]."""
    found = []
    ranking = teacher.tolist()
    for q in range(len(ranking)):
        if len(eligible(q, sinks, window)) <= pool:
            continue
        kept = best_of_pool(ranking, 0.0, q, sinks, window, pool)
        newcomer, boundary = q - window, kept[-1]
        if newcomer != boundary:
            margin = teacher[newcomer] - teacher[boundary]
            delta = student[newcomer] - student[boundary]
            found.append(Decision(q, newcomer, boundary, newcomer in kept, margin, delta))
    return found


# The rule.


@lru_cache(maxsize=64)
def random_weights(
    seed: int, layers: int, kv_heads: int, d: int, memory: bool, normed: bool = False
) -> list[list[HeadWeights]]:
    """By layer and KV head: scores that spread over tens, decays of every rate. Float32 numbers in float64. normed: the
    memory's answers go through a head norm."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).double()

    def head() -> HeadWeights:
        hidden, width = 8, 3 * d if memory else 2 * d
        remembers = (
            {
                "wq": draw(d, 2 * d, scale=0.5),
                "input_gate": draw(2 * d, scale=0.3),
                "input_bias": draw(),
                "forget_gate": draw(2 * d, scale=0.3),
                "forget_bias": draw() + 2,
            }
            if memory
            else {}
        )
        return HeadWeights(
            shift=draw(2 * d, scale=0.3),
            scale=1 + draw(2 * d, scale=0.2),
            w1=draw(hidden, width, scale=width**-0.5),
            b1=draw(hidden, scale=0.3),
            w2=draw(hidden, scale=10.0),
            b2=draw(),
            log_gamma=torch.empty((), dtype=torch.float64).uniform_(-1e-3, -1e-6, generator=generator).float().double(),
            **remembers,
            norm=1 + draw(d, scale=0.3) if memory and normed else None,
        )

    return [[head() for _ in range(kv_heads)] for _ in range(layers)]


def tensors(heads: list[HeadWeights]) -> dict[str, Tensor]:
    """Stacked over heads `[heads, ...]`, as the modules under test store them: matrices multiply from the right."""
    found = {
        "shift": [head.shift for head in heads],
        "scale": [head.scale for head in heads],
        "w1": [head.w1.T for head in heads],
        "b1": [head.b1 for head in heads],
        "w2": [head.w2 for head in heads],
        "b2": [head.b2 for head in heads],
    }
    if heads[0].wq is not None:
        found["wq"] = [_there(head.wq).T for head in heads]
        found["gates"] = [torch.stack([_there(head.input_gate), _there(head.forget_gate)], dim=-1) for head in heads]
        if heads[0].norm is not None:
            found["norm"] = [_there(head.norm) for head in heads]
        found["gate_bias"] = [torch.stack([_there(head.input_bias), _there(head.forget_bias)]) for head in heads]
    return {name: torch.stack(parts) for name, parts in found.items()}


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


@lru_cache(maxsize=100_000)
def _priority(rule: KVpop, record: Record, layer: int, kv_head: int, t: int, delay: int) -> float:
    weights = rule.weights(record)[layer][kv_head]
    keys, values = record.raw_keys[layer][:, kv_head], record.values[layer][:, kv_head]
    if rule.memory:
        # What comes later must not matter, so it is not there.
        seen = slice(0, t + delay)
        score = memory_score(weights, keys[seen], values[seen], t, delay)
    else:
        score = mlp_score(weights, keys, values, t)
    return (score - t * weights.log_gamma).item()


@dataclass(frozen=True)
class KVpop(Rule):
    """Sinks and window stay; of the tokens that have left the window the lowest static priority goes first.

    `recent`: the share of the entries that stays as recent where that is more than the window; one is left to choose.
    `waits_for_recent`: a token is scored as it leaves those, and not as it leaves the window.
    """

    memory: bool
    weights_seed: int = 0
    sinks: int = 4
    window: int = 32
    recent: float = 0.0
    waits_for_recent: bool = False
    normed: bool = False

    token_at_a_time = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return "kvpop" if self.memory else "kvpop_mlp"

    @property
    def least_budget(self) -> int:
        return self.sinks + self.window + 1

    @property
    def needs_a_number(self) -> bool:
        """A share of the text is refused as a budget: how long a token waits would change while it is read."""
        return self.memory and self.waits_for_recent and bool(self.recent)

    def weights(self, record: Record) -> list[list[HeadWeights]]:
        dense = record.dense
        return random_weights(self.weights_seed, dense.layers, dense.kv_heads, dense.head_dim, self.memory, self.normed)

    def cut(self, record: Record, moment: Moment) -> list[Cut]:
        cuts = []
        for kv_head, held in enumerate(record.held[moment.layer]):
            stays = max(
                self.window, min(moment.budget * round(100 * self.recent) // 100, moment.budget - self.sinks - 1)
            )
            out_of_window = [t for t in held if self.sinks <= t <= moment.next_query - stays]
            protected = [t for t in held if t not in out_of_window]
            if len(held) + 1 <= moment.budget:
                cuts.append(Cut(list(held)))
                continue
            delay = stays if self.waits_for_recent else self.window
            scores = {t: _priority(self, record, moment.layer, kv_head, t, delay) for t in out_of_window}
            chosen = choose(scores, moment.budget - 1 - len(protected))
            cuts.append(Cut(sorted(chosen.kept + protected), chosen.gap))
        return cuts
