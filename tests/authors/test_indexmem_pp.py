"""IndexMem++ and its twin against the authors' code: scores, head budgets, what is kept, logits, centroids.

The numbers are those of `studies/authors/indexmem_pp.py`; the weights are drawn again by its rule.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from twin_comparison import forward, kept

from evictbench.cache.new_cache import new_cache
from evictbench.models.policy_weights import Weights
from evictbench.policies.indexmem_pp import IndexMem, Settings
from evictbench.policies.indexmem_pp.allocation import mass_budgets
from evictbench.policies.indexmem_pp.centroids import cluster, cluster_from
from evictbench.policies.indexmem_pp.hub import RELEASED
from evictbench.policies.indexmem_pp.recursion import expiry
from evictbench.policies.indexmem_pp.scorer import scorers
from evictbench.policy import NEVER, ModelShape
from studies.authors.indexmem_pp import (
    CASES,
    DEADLINES,
    DIVISION_SINKS,
    DIVISION_WINDOW,
    DIVISIONS,
    Case,
    deadline_scores,
    division,
    drawn,
    model_of,
    tokens,
)
from twin.indexmem_pp import divide_by_mass, score_and_rate
from twin.indexmem_pp_run import Rules, Run, Told

pytestmark = pytest.mark.engine

DATA = Path(__file__).parent / "data/indexmem_pp"
EXACT = {"atol": 1e-6, "rtol": 0}
"""Their pool, budgets and centroids are float32 in a model that is float64."""


@cache
def numbers(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


@cache
def model(name: str) -> Any:
    return model_of(CASES[name])


def checkpoint(case: Case) -> dict[str, Any]:
    """A checkpoint of a case's scorers, with names as their code saves them."""
    saved = numbers("functions")["checkpoint"]
    named = {}
    for layer in range(case.layers):
        for name, (_, shape) in saved["scorers"].items():
            if name.startswith("0."):
                sizes = [case.kv_heads if size == 2 and name != "0.gate_scale" else size for size in shape]
                own = name.replace("0.", f"{layer}.", 1)
                named[own] = torch.from_numpy(drawn(own, sizes))
    config = saved["scorer_config"] | {"n_heads": case.kv_heads}
    return {"scorer_config": config, "scorers": named, "step": saved["step"], "training_config": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indexmem_pp")


def weights(case: Case, folder: Path) -> dict[str, Tensor]:
    """Our tensors, by the reader of released checkpoints."""
    file = folder / "indexmem.pt"
    torch.save(checkpoint(case), file)
    return RELEASED.read(file, "a test", ModelShape.of(model_of(case).config))[0]


def policy_of(case: Case, folder: Path) -> IndexMem:
    table = folder / "table.pt"
    torch.save({"table": torch.tensor(case.table or ()), "config": {}}, table)
    by_table = case.budgets == "static"
    config = Settings(
        sinks=case.sinks,
        window=case.window,
        centroids=case.centroids,
        budgets="table" if by_table else case.budgets,  # type: ignore[arg-type]
        floor=None if by_table else case.floor,
        table=str(table) if by_table else None,
    )
    policy = IndexMem(config)
    policy.use(Weights(weights(case, folder), {}, "a test", "0"), ModelShape.of(model_of(case).config))
    return policy


def told(name: str, folder: Path) -> Told:
    """The twin, with the authors' way to attend after the prompt."""
    case, known = CASES[name], numbers(name)
    own = weights(case, folder)
    by_layer = [{key: tensor[layer].double() for key, tensor in own.items()} for layer in range(case.layers)]

    def scorer(layer: int, kv_head: int, position: int, received: Tensor) -> tuple[float, float]:
        return score_and_rate(by_layer[layer], received, position, kv_head)

    def starts(layer: int, kv_head: int, evicted: Sequence[int]) -> Sequence[int]:
        # What does not compete has no weight in theirs, so that clusters there stay empty.
        return [j for j in known["starts"][layer][kv_head] if j in set(evicted)]

    rules = Rules(
        context=case.prompt,
        budget=case.budget,
        sinks=case.sinks,
        window=case.window,
        centroids=case.centroids,
        budgets="table" if case.budgets == "static" else case.budgets,  # type: ignore[arg-type]
        floor=case.floor,
        table=case.table,
        on_top=True,
    )
    run = Run(model(name), scorer, rules, starts, case.length)
    for begin, end in parts(case):
        run.read(tokens(case)[begin:end])
    return run.told()


def parts(case: Case) -> list[tuple[int, int]]:
    """Their passes."""
    asked = case.prompt + case.question
    question = [(case.prompt, asked)] if case.question else []
    return [(0, case.prompt), *question, *((at, at + 1) for at in range(asked, case.length))]


@pytest.mark.parametrize("name", CASES)
def test_the_twin_is_their_code(name: str, folder: Path) -> None:
    """Logits of the prompt and of every later token, what each query sees, and the entries of each centroid."""
    case, known, twin = CASES[name], numbers(name), told(name, folder)
    prompt = torch.tensor(known["prompt_logits"], dtype=torch.float64)
    torch.testing.assert_close(twin.logits[case.prompt - 8 : case.prompt], prompt, **EXACT)
    for pass_, (begin, end) in enumerate(parts(case)[1:]):
        for q in range(begin, end):
            for (layer, head), seen in twin.seen[q].items():
                assert seen == [*known["held"][pass_][layer][head], *range(begin, q + 1)]
                if case.centroids:
                    counts = [count for count in known["counts"][pass_][layer][head] if count]
                    assert sorted(twin.counts[q][layer, head]) == sorted(counts)
    found = twin.logits[case.prompt :]
    torch.testing.assert_close(found, torch.tensor(known["logits"], dtype=torch.float64), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_the_policy_reads_a_prompt_as_they_do(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores, head budgets, the masked prompt's logits, and what is kept of it."""
    case, known = CASES[name], numbers(name)
    policy = policy_of(case, folder)
    scored, shares = {}, {}
    features, head_budgets = policy.features, policy.head_budgets
    monkeypatch.setattr(policy, "features", lambda new: scored.setdefault(new.layer, features(new)))
    monkeypatch.setattr(policy, "head_budgets", lambda given: shares.setdefault(given.layer, head_budgets(given)))
    cache = new_cache(model(name), policy, case.budget, prompt_length=case.prompt)
    logits = forward(model(name), cache, tokens(case)[: case.prompt])
    torch.testing.assert_close(logits[-8:], torch.tensor(known["prompt_logits"], dtype=torch.float64), **EXACT)
    for layer in range(case.layers):
        assert (shares[layer] + case.sinks + case.window).tolist() == known["budgets"][layer]
        score, rate = scored[layer]["score"][0].double().unbind(-1)
        intercept = score - rate * torch.arange(case.prompt) / 16384
        torch.testing.assert_close(rate, torch.tensor(known["rate"][layer]).double(), atol=1e-3, rtol=1e-6)
        torch.testing.assert_close(intercept, torch.tensor(known["score"][layer]).double(), atol=1e-4, rtol=1e-6)
    if not case.question:  # after a question of several tokens they decide nothing between them
        held = known["held"][1]
        for layer in range(case.layers):
            for head in range(case.kv_heads):
                # What the next query sees without itself: their pool once that query's entry is in.
                assert kept(cache, layer, head) == [j for j in held[layer][head] if j != case.prompt]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.question])
def test_the_policy_keeps_what_they_keep_while_it_decodes(name: str, folder: Path) -> None:
    """In the first layer, whose scores do not depend on what was seen, to the end; the others' part is counted."""
    case, known = CASES[name], numbers(name)
    cache = new_cache(model(name), policy_of(case, folder), case.budget, prompt_length=case.prompt)
    forward(model(name), cache, tokens(case)[: case.prompt])
    different = total = 0
    for step, position in enumerate(range(case.prompt, case.length), start=1):
        for layer in range(case.layers):
            for head in range(case.kv_heads):
                theirs = [j for j in known["held"][step][layer][head] if j != position]
                mine = kept(cache, layer, head)
                assert layer or mine == theirs
                different += len(set(mine) - set(theirs))
                total += len(mine)
        forward(model(name), cache, tokens(case)[position : position + 1])
    assert different <= 0.005 * total


@pytest.mark.parametrize("name", ["mass", "uniform", "fits"])
def test_clusters_are_theirs_from_their_starts(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, known = CASES[name], numbers(name)
    policy = policy_of(case, folder)
    given: list[tuple[Tensor, Tensor]] = []

    def clustered(keys: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        given.append((keys, values))
        return cluster(keys, values, count)

    monkeypatch.setattr(policy, "cluster", clustered)
    cache = new_cache(model(name), policy, case.budget, prompt_length=case.prompt)
    forward(model(name), cache, tokens(case)[: case.prompt])
    assert len(given) == case.layers * case.kv_heads
    for at, (keys, values) in enumerate(given):
        layer, head = divmod(at, case.kv_heads)
        evicted = sorted(set(range(case.prompt)) - set(known["held"][0][layer][head]))
        assert len(evicted) == len(keys)
        first = [evicted.index(j) for j in known["starts"][layer][head] if j in evicted]
        found, _, counts = cluster_from(keys, values, keys[first])
        theirs = [
            (key, count)
            for key, count in zip(known["centroids"][layer][head], known["counts"][0][layer][head], strict=True)
            if count
        ]
        assert sorted(counts.tolist()) == sorted(count for _, count in theirs)
        for key, count in theirs:
            distance = (found - torch.tensor(key, dtype=found.dtype)).abs().amax(-1)
            assert float(distance.min()) < 1e-5
            assert counts[distance.argmin()] == count


@pytest.mark.parametrize("number", range(len(DIVISIONS)))
def test_head_budgets_are_theirs(number: int) -> None:
    kv_heads, group, entries, budget, floor, _ = DIVISIONS[number]
    query, keys, scores = division(number)
    logits = torch.einsum("hd,hsd->hs", query[0, :, 0], keys[0].repeat_interleave(group, 0)) * 8**-0.5
    mass = logits.softmax(-1).view(kv_heads, group, entries).mean(1)
    position, protected = torch.arange(entries), DIVISION_SINKS + DIVISION_WINDOW
    competes = (position >= DIVISION_SINKS) & (position < entries - DIVISION_WINDOW)
    share = budget - protected
    least = min(floor, share)
    found = mass_budgets(mass, scores, ~competes.expand(kv_heads, -1), total=share * kv_heads, floor=least + 1)
    known = numbers("functions")["divisions"][number]
    assert (found + protected).tolist() == known
    order = scores.double().masked_fill(~competes, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    best = mass.double().gather(1, order)[:, : int(competes.sum())].tolist()
    pinned = (mass.double() * ~competes).sum(-1).tolist()
    assert [n + protected for n in divide_by_mass(best, pinned, share * kv_heads, least)] == known


@pytest.mark.parametrize("number", range(len(DEADLINES)))
def test_deadlines_are_theirs(number: int) -> None:
    """Theirs is the last position at the window's edge at which an entry is kept; ours the first query without it."""
    entries, budgets, sinks, window = DEADLINES[number]
    scores = deadline_scores(number)
    positions = torch.arange(entries, dtype=torch.int32).expand(len(budgets), -1)
    found = expiry(
        scores,
        torch.zeros_like(scores),
        positions,
        first=0,
        new=entries,
        capacity=torch.tensor(budgets) - sinks - window,
        sinks=sinks,
        window=window,
        how="middle",
    )
    theirs = torch.tensor(numbers("functions")["deadlines"][number]) + window + 1
    theirs = torch.maximum(theirs, positions + window)  # not before it leaves the window
    theirs = theirs.masked_fill((theirs > entries) | (positions < sinks), NEVER)
    assert torch.equal(found.long(), theirs.long())


def test_a_checkpoint_of_their_code_is_read(folder: Path) -> None:
    """Keys, names, dtypes and shapes as `save_scorer_checkpoint` writes them."""
    saved = numbers("functions")["checkpoint"]
    case = CASES["mass"]
    dtypes = {"torch.bfloat16": torch.bfloat16, "torch.float32": torch.float32}
    named = {
        name: torch.from_numpy(drawn(name, shape)).to(dtypes[dtype])
        for name, (dtype, shape) in saved["scorers"].items()
    }
    payload = {"scorer_config": saved["scorer_config"], "scorers": named, "step": 600, "training_config": None}
    assert sorted(payload) == saved["keys"]
    torch.save(payload, folder / "theirs.pt")
    shape = ModelShape.of(model("mass").config)
    tensors, card = RELEASED.read(folder / "theirs.pt", "a test", shape)
    assert card["settings"] == {"sinks": 4, "window": 128, "centroids": 64, "beta": None, "width": 12}
    for name, tensor in weights(case, folder).items():
        torch.testing.assert_close(tensors[name], tensor, atol=0, rtol=2**-8)
    assert len(scorers(tensors, shape)) == case.layers
