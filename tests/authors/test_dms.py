"""DMS against the authors' code: decisions, what is seen at every step, and logits, on checkpoints that it saved.

The numbers are those of `studies/authors/dms.py`; the weights are drawn again by its rule.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from twin_comparison import forward, kept

from evictbench import EvictionCache
from evictbench.policies.dms import DMS
from studies.authors.dms import drawn

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("own_cache")]

DATA = Path(__file__).parent / "data/dms"
CASES = ("adapters", "adapters_with_bias", "adapters_by_layer", "borrowed", "borrowed_by_layer")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVICTBENCH_CACHE", str(tmp_path / "cache"))


@cache
def numbers(case: str) -> Any:
    return json.loads((DATA / f"{case}.json").read_text(encoding="utf-8"))


def checkpoint(case: str, folder: Path, shards: int = 1) -> Path:
    """The checkpoint of a case, as their code saved it; with shards, as transformers cuts a large one."""
    known = numbers(case)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(known["config"]))
    assert {dtype for dtype, _ in known["tensors"].values()} == {"BF16"}
    held = {name: torch.from_numpy(drawn(name, shape)).bfloat16() for name, (_, shape) in known["tensors"].items()}
    if shards == 1:
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    place = {name: names[number % shards] for number, name in enumerate(held)}
    for file in names:
        save_file({name: held[name] for name in held if place[name] == file}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def loaded(folder: Path) -> Any:
    """The model in float64, as transformers loads it without the authors' code."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[torch.Tensor]]:
    """Every z that the policy reads, by layer."""
    z: dict[int, list[torch.Tensor]] = {}
    one, several = DMS.read, DMS.read_layers

    def read(self: Any, layer: int, *given: Any) -> torch.Tensor:
        z.setdefault(layer, []).append(one(self, layer, *given)[0])
        return z[layer][-1][None]

    def read_layers(self: Any, layers: Any, *given: Any) -> torch.Tensor:
        if self.borrowed:  # which asks `read` for each layer
            return several(self, layers, *given)
        result = several(self, layers, *given)
        for layer, values in zip(layers, result, strict=True):
            z.setdefault(layer, []).append(values[0])
        return result

    monkeypatch.setattr(DMS, "read", read)
    monkeypatch.setattr(DMS, "read_layers", read_layers)
    return z


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shards", [1, 3])
def test_decisions_entries_seen_and_logits_are_the_authors(
    case: str, shards: int, tmp_path: Path, read: dict[int, list[torch.Tensor]]
) -> None:
    known = numbers(case)
    model = loaded(checkpoint(case, tmp_path / "checkpoint", shards))
    ratio = known["config"]["dms_cr"]
    cache = EvictionCache(model, "dms", f"{100 / ratio:g}%", prompt_length=known["prompt"])
    tokens, prompt = known["tokens"], known["prompt"]
    logits = [forward(model, cache, tokens[:prompt])]
    for layer, steps in enumerate(known["seen"]):
        for head, seen in enumerate(steps[0]):
            assert [*kept(cache, layer, head), prompt] == seen
    for step, place in enumerate(range(prompt, len(tokens))):
        logits.append(forward(model, cache, [tokens[place]]))
        for layer, steps in enumerate(known["seen"]):
            for head, seen in enumerate(steps[step]):
                # The next query no longer sees what leaves the window with this one.
                held = kept(cache, layer, head)
                assert set(held) <= set(seen)
                if step + 1 < len(steps):
                    assert [*held, place + 1] == steps[step + 1][head]
    ours = torch.tensor([torch.cat(read[layer], dim=-1).tolist() for layer in sorted(read)])
    theirs = torch.tensor(known["z"])
    assert theirs.abs().min() > 1e-3, "a decision on the edge would be chance"
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-5)
    marked = [["".join("01"[int(z > 0)] for z in head) for head in layer] for layer in ours]
    assert marked == known["marked"]
    torch.testing.assert_close(torch.cat(logits).float(), torch.tensor(known["logits"]), atol=1e-5, rtol=1e-5)


def test_the_cases_are_not_trivial() -> None:
    """Each evicts, heads differ where each decides for itself, and one head marks everything."""
    for case in CASES:
        known = numbers(case)
        last = [len(head) for layer in known["seen"] for head in layer[-1]]
        assert min(last) < len(known["tokens"]) - known["config"]["dms_window_size"]
        by_layer = known["config"]["dms_alpha_per"] == "layer"
        assert all((layer[0] == layer[1]) == by_layer for layer in known["marked"])
    assert "0" not in numbers("adapters_with_bias")["marked"][-1][-1]
    assert len(numbers("adapters_with_bias")["seen"][-1][-1][-1]) == 9 + 1


def test_reading_the_prompt_in_chunks_is_exact_here_and_not_there(tmp_path: Path) -> None:
    """Theirs counts pages without entries as one unit of probability; only a head that keeps nothing has such pages."""
    exact = {case: numbers(case)["chunked"]["largest_difference"] for case in CASES}
    assert exact.pop("adapters_with_bias") == pytest.approx(0.608, abs=1e-3)
    assert max(exact.values()) < 2e-6
    known = numbers("adapters_with_bias")
    model = loaded(checkpoint("adapters_with_bias", tmp_path / "checkpoint"))
    cache = EvictionCache(model, "dms", "12.5%", prompt_length=known["prompt"])
    parts = [known["tokens"][start : start + 16] for start in range(0, known["prompt"], 16)]
    parts[-1] = known["tokens"][32 : known["prompt"]]
    logits = torch.cat([forward(model, cache, part) for part in parts])
    whole = torch.tensor(known["logits"][: known["prompt"]])
    torch.testing.assert_close(logits.float(), whole, atol=1e-5, rtol=1e-5)


def test_kvpress_attends_the_whole_prompt_and_goes_by_each_tokens_own_score(tmp_path: Path) -> None:
    """DMSPress with the adapters as its scorer: the window is the same, the decisions and the prompt are not."""
    known, press = numbers("adapters"), numbers("kvpress")
    model = loaded(checkpoint("adapters", tmp_path / "checkpoint"))
    tokens, prompt, window = known["tokens"], known["prompt"], press["window"]
    gate = EvictionCache(model, "dms", "25%").policy._gate
    with torch.no_grad():
        dense = model(torch.tensor([tokens[:prompt]]), output_hidden_states=True)
    torch.testing.assert_close(dense.logits[0, -1].float(), torch.tensor(press["logits"][0]), atol=1e-5, rtol=1e-5)
    own, by_rule, by_prompt = [], 0, 0
    for layer in range(2):
        z = gate.logits(layer, dense.hidden_states[layer])[0]
        for head in range(2):
            own.append([place for place in range(prompt - window) if z[head, place] > 0])
            governed = {place for place in range(prompt - window) if z[head, place + 1] > 0}
            authors = set(range(prompt)) - set(known["seen"][layer][0][head])
            by_rule += len(governed ^ set(own[-1]))
            by_prompt += len(governed ^ authors)
    assert [head for layer in press["masked"][0] for head in layer] == own
    assert (by_rule, by_prompt) == (60, 9), "of 124 tokens that have left the window"
    assert max(place for row in press["masked"][-1] for head in row for place in head) < len(tokens) - window
