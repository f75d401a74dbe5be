"""The authors' checkpoint as far as it is known: the model in it is read, its scorers are refused by their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evictbench.cli import app
from evictbench.errors import UserError
from evictbench.models import load, policy_weights
from evictbench.policies.kvpop import KVpop
from evictbench.policies.kvpop.hub import BUDGET, MODEL_TYPE, POOL, STATE
from evictbench.policy import ModelShape

SCORER = "model.layers.{}.self_attn.scorer.out.weight"


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_qwen3: Callable[[], Any]) -> Path:
    """A tiny Qwen3 with a tensor of a scorer in each layer, and a config that names its own code."""
    folder = tmp_path / "released"
    tiny_qwen3().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    layers = ModelShape.of(tiny_qwen3().config).layers
    tensors |= {SCORER.format(layer): torch.ones(2, 3) for layer in range(layers)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, model_type=MODEL_TYPE, kvpop_top_k=POOL, auto_map={"AutoConfig": "configuration_qwen3kvpop.Theirs"})
    return folder


def change(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def refused(folder: Path, shape: ModelShape) -> str:
    with pytest.raises(UserError) as caught:
        policy_weights.find(KVpop(), str(folder), "tiny", lambda: "", shape)
    return str(caught.value)


def test_kvpop_divides_the_released_budget_as_its_card_says() -> None:
    """4 sinks, 256 recent, 3,772 scored, and a state that is charged as 64 entries are 4,096."""
    policy, shape = KVpop(), ModelShape(layers=36, heads=32, kv_heads=8, head_dim=128)
    assert policy.charge(shape).fixed == STATE
    assert (policy.protection.sinks, policy.protection.window) == (4, 256)
    assert policy.protection.pool(BUDGET - STATE) == POOL == 3772


def test_the_model_is_read_without_its_code(checkpoint: Path, tiny_qwen3: Callable[[], Any]) -> None:
    source = load.resolve(str(checkpoint))
    config = load.load_config(source)
    assert config.model_type == "qwen3"
    load.check_supported(config)
    model, tokens = load.load_model(source, "cpu"), torch.arange(9)[None]
    left = load.unused_tensors(source)
    assert left is not None
    assert SCORER.format(0) in left.first
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, tiny_qwen3().eval()(tokens).logits)


def test_a_scorer_is_refused_with_what_was_found(checkpoint: Path) -> None:
    shape = ModelShape.of(load.load_config(load.resolve(str(checkpoint))))
    sentence = refused(checkpoint, shape)
    assert f"beside Qwen3's it has {SCORER.format('N')} ({shape.layers})" in sentence
    assert "its config sets kvpop_top_k." in sentence
    assert "embed_tokens" not in sentence


def test_an_index_is_enough(checkpoint: Path, tmp_path: Path) -> None:
    """No shard is there, or fetched."""
    shape, folder = ModelShape.of(load.load_config(load.resolve(str(checkpoint)))), tmp_path / "index"
    folder.mkdir()
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())
    names = [*load_file(checkpoint / "model.safetensors"), "gamma"]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00004.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"it has gamma, {SCORER.format('N')} ({shape.layers})" in refused(folder, shape)


def test_the_command_ends_with_the_sentence(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a weight is loaded, and without asking to trust its code."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"w{number}": number for number in range(97)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", eos_token="w1").save_pretrained(checkpoint)
    text = checkpoint.parent / "text.txt"
    text.write_text(" ".join(f"w{number % 97}" for number in range(2000)))
    options = ["--policy", "kvpop", "--budget", "64", "--suite", "fidelity", "--tasks", "text"]
    places = ["--model", str(checkpoint), "--weights", str(checkpoint), "--haystack", str(text)]
    with pytest.raises(SystemExit) as ended:
        app.main(["run", *options, *places, "--context", "64", "--out", str(checkpoint.parent / "runs")])
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: The weights ")
    assert SCORER.format("N") in error
    assert "trust" not in error


def test_what_is_no_such_checkpoint_is_a_sentence(checkpoint: Path) -> None:
    shape = ModelShape.of(load.load_config(load.resolve(str(checkpoint))))
    wider = ModelShape(shape.layers, shape.heads, shape.kv_heads, 2 * shape.head_dim)
    assert f"head_dim {shape.head_dim}, and this model has {wider.head_dim}." in refused(checkpoint, wider)
    save_file({"lm_head.weight": torch.ones(2)}, checkpoint / "model.safetensors")
    assert refused(checkpoint, shape).endswith("hold a Qwen3 model and no tensor of a scorer.")
    change(checkpoint, model_type="qwen3")
    assert "a whole model (qwen3) and no weights of kvpop" in refused(checkpoint, shape)
