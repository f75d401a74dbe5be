"""Weights that do not fit a model, and damaged folders: a sentence that names the file, before it costs time."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_models import LFS_POINTER, both, copy, entries, make_model, make_tokenizer, tensors, text

from evictbench.errors import UserError
from evictbench.evaluation import thinking
from evictbench.models import load
from evictbench.models.loaded_weights import check_finite

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("own_cache")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "whole")


def added(name: str, *shape: int, dtype: str = "float32", value: float = 1.0):
    def add(held: dict) -> None:
        import torch

        held[name] = torch.full(shape, value, dtype=getattr(torch, dtype))

    return tensors(add)


def stage(folder: Path) -> tuple[str, str]:
    """How far a folder gets, and the sentence that it ends with."""
    source = load.resolve(str(folder))
    reached = "config"
    try:
        config = load.load_config(source)
        reached = "tokenizer"
        tokenizer = load.load_tokenizer(source)
        load.check_vocabulary(tokenizer, config, "broken")
        reached = "template"
        thinking.template_default(tokenizer)
        load.check_supported(config)
        reached = "hash"
        load.weights_hash(source)
        reached = "weights"
        load.load_model(source, "cpu")
    except UserError as error:
        return reached, str(error)
    return "loaded", ""


NORM = "model.norm.weight"
COUNT = "it has to be a whole number from 1 on"

BROKEN = {
    "nothing": (lambda _: None, "loaded", ""),
    # config.json
    "config torn": (text("config.json", "{"), "config", "config.json is no JSON file"),
    "config deep": (text("config.json", "[" * 100_000), "config", "config.json is no JSON file"),
    "config a list": (text("config.json", "[]"), "config", "config.json holds a list"),
    "config a pointer": (text("config.json", LFS_POINTER), "config", "config.json is a Git LFS pointer"),
    "no model type": (entries(drop=("model_type",)), "config", "model_type is missing"),
    "model type a number": (entries(model_type=3), "config", "model_type is 3"),
    "unknown model type": (entries(model_type="brandnew"), "config", "config.json of"),
    "no heads": (entries(num_attention_heads=0), "config", f"num_attention_heads 0; {COUNT}"),
    "half a head": (entries(num_attention_heads=2.5), "config", f"num_attention_heads 2.5; {COUNT}"),
    "no KV heads": (entries(num_key_value_heads=0), "config", f"num_key_value_heads 0; {COUNT}"),
    "no layers": (entries(num_hidden_layers=0), "config", f"num_hidden_layers 0; {COUNT}"),
    "-1 layers": (entries(num_hidden_layers=-1), "config", f"num_hidden_layers -1; {COUNT}"),
    "no vocabulary": (entries(vocab_size=0), "config", f"vocab_size 0; {COUNT}"),
    "no head width": (entries(head_dim=0), "config", f"head_dim 0; {COUNT}"),
    "negative window": (entries(max_position_embeddings=-5), "config", f"max_position_embeddings -5; {COUNT}"),
    "window in words": (entries(max_position_embeddings="long"), "config", f"'long'; {COUNT}"),
    "KV heads that do not divide": (entries(num_key_value_heads=3), "config", "4 attention heads cannot share 3"),
    "hidden size that does not divide": (entries(hidden_size=65), "config", "65"),
    "unknown dtype": (entries(dtype="int3"), "config", "names 'int3' as the dtype"),
    "unknown activation": (entries(hidden_act="nope"), "weights", "asks for 'nope'"),
    "unknown quantisation": (
        entries(quantization_config={"quant_method": "secret"}),
        *("config", "by the method 'secret', unknown to transformers"),
    ),
    "quantised somehow": (entries(quantization_config={"bits": 4}), "config", "without naming the method"),
    "own code": (
        entries(model_type="odd", auto_map={"AutoConfig": "odd.Odd", "AutoModelForCausalLM": "odd.Odd"}),
        *("config", "say --trust-remote-code"),
    ),
    "generation config torn": (text("generation_config.json", "{"), "config", "generation_config.json is no JSON file"),
    "end token in words": (
        entries("generation_config.json", eos_token_id="end"),
        *("config", "generation_config.json has eos_token_id 'end'"),
    ),
    # the tokenizer
    "tokenizer torn": (text("tokenizer.json", "{"), "tokenizer", "tokenizer.json is no JSON file"),
    "tokenizer a list": (text("tokenizer.json", "[]"), "tokenizer", "tokenizer.json holds a list"),
    "tokenizer a pointer": (text("tokenizer.json", LFS_POINTER), "tokenizer", "tokenizer.json is a Git LFS pointer"),
    "large tokenizer torn": (
        text("tokenizer.json", '{"version": "1.0", "x": "' + "x" * 600_000),
        *("tokenizer", "tokenizer.json is no JSON file"),
    ),
    "tokenizer of nothing": (text("tokenizer.json", "{}"), "tokenizer", "The tokenizer of"),
    "tokenizer config a list": (text("tokenizer_config.json", "[]"), "config", "tokenizer_config.json holds a list"),
    "tokenizer too large": (lambda folder: make_tokenizer(folder, 500), "tokenizer", "has 500 tokens, and the model's"),
    "template that raises": (
        text("chat_template.jinja", "{{ raise_exception('only pictures') }}"),
        *("template", "The chat template cannot render a conversation: only pictures"),
    ),
    "template torn": (text("chat_template.jinja", "{% if %}"), "template", "The chat template cannot render a conv"),
    # the weights
    "weights a pointer": (text("model.safetensors", LFS_POINTER), "hash", "model.safetensors is a Git LFS pointer"),
    "weights empty": (text("model.safetensors", ""), "hash", "it has 0 bytes"),
    "weights of another format": (text("model.safetensors", "PK" * 50), "hash", "is no safetensors file"),
    "missing": (tensors(lambda held: held.pop(NORM)), "weights", f"1 tensors are missing, {NORM} first"),
    "mis-shaped": (
        added(NORM, 32),
        *("weights", f"{NORM} is [32] in model.safetensors, and [64] is expected"),
    ),
    "mis-sized vocabulary": (entries(vocab_size=120), "weights", "is [97, 64] in model.safetensors, and [120, 64]"),
    "not a number": (
        added(NORM, 64, value=float("nan")),
        "weights",
        "are not finite in float32: NaN or infinite numbers in 1 of",
    ),
    "infinite": (added(NORM, 64, value=float("-inf")), "weights", f"{NORM} in model.safetensors first"),
    "too large for float16": (
        both(added(NORM, 64, value=1e30), entries(dtype="float16")),
        *("weights", "are not finite in float16"),
    ),
    "integers": (added(NORM, 64, dtype="int32"), "weights", f"{NORM} is stored as I32 in model.safetensors"),
    "more layers than the config": (entries(num_hidden_layers=1), "weights", "the config makes 1 layers"),
    "biases that the config leaves out": (
        added("model.layers.0.self_attn.q_proj.bias", 64),
        *("weights", "they have model.layers.0.self_attn.q_proj.bias, and the config makes a model without it"),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_a_sentence_as_early_as_can_be(whole, tmp_path, case):
    folder = copy(whole, tmp_path / "broken")
    change, ends, sentence = BROKEN[case]
    change(folder)
    reached, said = stage(folder)
    assert (reached, sentence in said) == (ends, True), (reached, said)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda _: None, None),
        (added("model.layers.0.self_attn.rotary_emb.inv_freq", 8), None),
        (added("vision.tower.weight", 4), (1, ("vision.tower.weight",))),
        (
            both(entries(num_hidden_layers=1, num_nextn_predict_layers=1), lambda _: None),
            (
                9,
                tuple(
                    f"model.layers.1.{rest}.weight"
                    for rest in (
                        "input_layernorm",
                        "mlp.down_proj",
                        "mlp.gate_proj",
                        "mlp.up_proj",
                        "post_attention_layernorm",
                    )
                ),
            ),
        ),
    ],
    ids=["nothing", "old rotary buffers", "another tower", "layers that predict further tokens"],
)
def test_tensors_without_a_place_are_recorded_by_name(whole, tmp_path, change, wanted):
    folder = copy(whole, tmp_path / "model")
    change(folder)
    source = load.resolve(str(folder))
    load.load_model(source, "cpu")
    unused = load.unused_tensors(source)
    assert (unused and (unused.count, unused.first)) == wanted
    if unused is not None:
        assert unused.record == {"count": wanted[0], "first": list(wanted[1])}
        assert unused.sentence.startswith(f"The model has no place for {wanted[0]} of the tensors in its files")


def test_the_dtype_is_the_one_that_is_named_even_where_the_config_names_none(whole, tmp_path):
    import torch

    folder = copy(whole, tmp_path / "model")
    entries(drop=("dtype",))(folder)
    tensors(lambda held: held.update({name: held[name].bfloat16() for name in held}))(folder)
    source = load.resolve(str(folder))
    assert load.resolve_dtype(load.load_config(source), "auto") == "float32"
    assert load.load_model(source, "cpu").dtype == torch.float32


def test_only_ids_that_have_an_embedding_are_prompts(whole):
    config = load.load_config(load.resolve(str(whole)))
    load.check_ids([[0, 96], []], config, "tiny")
    with pytest.raises(UserError, match=r"gives the token 97, and the model's embedding ends with 96"):
        load.check_ids([[0, 96], [97]], config, "tiny")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_finite_means_every_entry_and_sums_that_overflow_do_not_count(dtype):
    import torch

    largest = torch.full((300,), torch.finfo(getattr(torch, dtype)).max, dtype=getattr(torch, dtype))
    fine = [("a", largest), ("none", torch.empty(0)), ("whole", torch.ones(3, dtype=torch.int64))]
    check_finite(fine, "These")
    for value in (float("nan"), float("inf"), -float("inf")):
        damaged = largest.clone()
        damaged[217] = value
        with pytest.raises(
            UserError, match=rf"^These are not finite in {dtype}: NaN or infinite numbers in 1 of 2 tensors, b first\.$"
        ):
            check_finite([*fine, ("b", damaged)], "These")
