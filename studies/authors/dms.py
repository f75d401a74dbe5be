"""The authors' DMS on tiny models: what it decides, what it keeps, and its logits, as numbers.

    git archive COMMIT experimental/dms | tar x -C CHECKOUT          # in a clone of NVIDIA/Model-Optimizer
    pip install torch==2.13.0 transformers==4.57.3 datasets accelerate                  # and what kvpress needs
    python -m studies.authors.dms --checkout CHECKOUT --kvpress KVPRESS [--out tests/authors/data/dms]

It needs an environment of its own and nothing of evictbench. The weights are drawn by a rule (`drawn`), so that no file
of weights is needed to make the model again; the checkpoint is saved by the authors' `extract_student_model`, and the
file of a case holds its config.json and the names, dtypes and shapes of its tensors. Runs are in float64.

Two things are not theirs: torch.compile is off, and flash-attn's `flash_attn_with_kvcache` is `paged_attention` below,
which does the same sums on the CPU. Masks, decisions, prefill, cache and decode are theirs. kvpress' DMSPress runs on
the same model with the adapters as its scorer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

REPOSITORY, COMMIT = "NVIDIA/Model-Optimizer", "a2fbac7bad8ab446d3f8783dadb0c3366eb0ad73"
KVPRESS, KVPRESS_COMMIT = "NVIDIA/kvpress", "8bb29b9c3078452a86d692f29123fa6c793e2b05"
COMMAND = "python -m studies.authors.dms --checkout CHECKOUT --kvpress KVPRESS"

PROMPT, ANSWER, VOCABULARY = 40, 24, 20

SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rope_theta": 1000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}

CASES: Mapping[str, Mapping[str, Any]] = {
    "adapters": {"dms_separate_alpha": True, "dms_window_size": 9, "dms_cr": 4},
    "adapters_with_bias": {"dms_separate_alpha": True, "attention_bias": True, "dms_window_size": 9},
    "adapters_by_layer": {
        "dms_separate_alpha": True,
        "dms_alpha_per": "layer",
        "attention_bias": True,
        "dms_alpha_scale": 50.0,
        "dms_initial_alpha_offset": 2.0,
        "dms_window_size": 6,
    },
    "borrowed": {"dms_window_size": 9, "dms_alpha_scale": 80.0, "dms_initial_alpha_offset": 3.0},
    "borrowed_by_layer": {"dms_window_size": 6, "dms_alpha_per": "layer"},
}
"""Options of their config by case; the others are at their defaults, but for the block size."""

LAST_BIAS = f"model.layers.{SHAPE['num_hidden_layers'] - 1}.self_attn.dms_proj_alpha.bias"

BLOCK, CHUNK = 4, 16
"""Entries in a block of their cache, and tokens in a chunk of the run that reads the prompt in chunks."""


def tokens() -> list[int]:
    """The text: prompt and answer."""
    return [7 * place * place % 11 + place * 5 % 9 for place in range(PROMPT + ANSWER)]


def drawn(name: str, shape: Sequence[int]) -> np.ndarray:
    """A tensor of the tiny model, float64 numbers that bfloat16 holds.

    Norms are near 1. Adapters are as large as it takes for about half of the tokens to be marked; where they have a
    bias, the last head of the last layer marks every token.
    """
    import numpy as np

    normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape))
    if name.endswith("norm.weight"):
        values = 1 + 0.3 * normal
    elif "dms_proj_alpha" in name:
        values = 0.05 * normal
        if name == LAST_BIAS:
            values[-1] = 4.0
    elif "embed_tokens" in name:
        values = normal
    else:
        values = 0.3 * normal
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def paged_attention(
    q: Any,
    key_blocks: Any,
    value_blocks: Any,
    *,
    k: Any = None,
    v: Any = None,
    cache_seqlens: Any,
    causal: bool,
    softmax_scale: float,
    block_table: Any,
    return_softmax_lse: bool = False,
) -> Any:
    """flash-attn's function on the CPU. A row without entries gives zeros and an lse of infinity, as flash-attn has it.

    q: `[rows, queries, heads, head_dim]`. key_blocks, value_blocks: `[blocks, size, 1, head_dim]`.
    """
    import torch

    output, lse = torch.zeros_like(q), q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("inf"))
    for row, length in enumerate(cache_seqlens.tolist()):
        if not length:
            continue
        blocks = block_table[row, : -(-length // key_blocks.shape[1])].long()
        keys, values = (held[blocks].flatten(0, 1)[:length, 0] for held in (key_blocks, value_blocks))
        scores = torch.einsum("qhd,kd->hqk", q[row], keys) * softmax_scale
        if causal:
            later = torch.arange(length) > torch.arange(q.shape[1])[:, None] + length - q.shape[1]
            scores = scores.masked_fill(later, float("-inf"))
        output[row] = torch.einsum("hqk,kd->qhd", scores.softmax(-1), values)
        lse[row] = scores.logsumexp(-1)
    return (output, lse) if return_softmax_lse else output


@dataclass
class Recorded:
    """What their attention was given and what its cache then held, by layer.

    z, marked: `[kv_heads][tokens]` a layer. keys: those of all tokens, to know entries in pages by. seen: by layer and
    answer token, the positions that each KV head's query saw.
    """

    z: dict[int, list[list[float]]] = field(default_factory=dict)
    marked: dict[int, list[str]] = field(default_factory=dict)
    keys: dict[int, Any] = field(default_factory=dict)
    seen: dict[int, list[list[list[int]]]] = field(default_factory=dict)

    def add(self, layer: int, logits: Any, decisions: Any, keys: Any) -> None:
        """Note a pass of one layer. logits, decisions: `[1, kv_heads, tokens]`; keys `[1, kv_heads, tokens, dim]`."""
        import torch

        heads = logits.shape[1]
        z = self.z.setdefault(layer, [[] for _ in range(heads)])
        marked = self.marked.setdefault(layer, [""] * heads)
        for head in range(heads):
            z[head] += logits[0, head].tolist()
            marked[head] += "".join(str(int(mark)) for mark in decisions[0, head])
        self.keys[layer] = torch.cat([self.keys[layer], keys], dim=2) if layer in self.keys else keys

    def add_seen(self, layer: int, pages: Any) -> None:
        """Note what lies in a layer's pages, position by position."""
        held = []
        for head in range(self.keys[layer].shape[1]):
            length = int(pages.cache_seq_lengths[head])
            blocks = pages.block_table[head, : -(-length // pages.block_size)].long()
            keys = pages.key_blocks[blocks].flatten(0, 1)[:length, 0]
            equal = (keys[:, None] == self.keys[layer][0, head]).all(-1)
            assert (equal.sum(-1) == 1).all(), "a key in the pages is not that of one token"
            held.append(sorted(equal.int().argmax(-1).tolist()))
        self.seen.setdefault(layer, []).append(held)


@contextmanager
def recorded(modeling: Any) -> Iterator[Recorded]:
    """Inside, their attention notes what it is given and what its cache holds."""
    theirs, record = modeling.dms_attention, Recorded()

    def attention(**given: Any) -> Any:
        layer = given["layer_idx"]
        record.add(layer, given["decision_logits"], given["decisions"], given["new_k"])
        output = theirs(**given)
        if given["dms_cache"][layer].is_inference_mode():
            record.add_seen(layer, given["dms_cache"][layer].paged_cache)
        return output

    modeling.dms_attention = attention
    try:
        yield record
    finally:
        modeling.dms_attention = theirs


def filled(model: Any) -> Any:
    """The model with every parameter from `drawn`, in float64."""
    import torch

    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(drawn(name, parameter.shape)))
    return model


def logits_of(model: Any, cache: Any) -> Any:
    """Logits `[tokens, vocabulary]` of the text: the prompt in one call, the answer token by token."""
    import torch

    text = torch.tensor([tokens()])
    with torch.no_grad():
        parts = [model(input_ids=text[:, :PROMPT], past_key_values=cache, use_cache=True).logits]
        for place in range(PROMPT, PROMPT + ANSWER):
            parts.append(model(input_ids=text[:, place : place + 1], past_key_values=cache, use_cache=True).logits)
    return torch.cat(parts, dim=1)[0]


def run_case(options: Mapping[str, Any]) -> dict[str, Any]:
    """One case of `CASES`: their model, its checkpoint, and its run."""
    configuration = import_module("models.qwen3.configuration_qwen3_dms")
    modeling = import_module("models.qwen3.modeling_qwen3_dms")
    training = import_module("models.qwen3.train")
    given = {**SHAPE, "dms_paged_attention_block_size": BLOCK, "dms_preallocate_for_tokens": 64, **options}
    config = configuration.Qwen3ConfigDMS(**given)
    model = filled(modeling.Qwen3ForCausalLMDMS(config))
    with recorded(modeling) as record:
        cache = model.get_cache()
        logits = logits_of(model, cache)
        compression = cache.get_cr()
    model.config.dms_chunked_prefill = CHUNK
    with recorded(modeling):
        in_chunks = logits_of(model, model.get_cache())
    model.config.dms_chunked_prefill = None
    checkpoint = saved(training, model)
    half = half_precision(modeling, model.bfloat16())
    return {
        **checkpoint,
        "tokens": tokens(),
        "prompt": PROMPT,
        "z": rounded([record.z[layer] for layer in sorted(record.z)]),
        "marked": [record.marked[layer] for layer in sorted(record.marked)],
        "seen": [record.seen[layer] for layer in sorted(record.seen)],
        "compression": rounded(compression),
        "logits": rounded(logits.tolist()),
        "chunked": {"chunk": CHUNK, "largest_difference": rounded(float((in_chunks - logits).abs().max()))},
        "bfloat16": half,
    }


def half_precision(modeling: Any, model: Any) -> dict[str, int]:
    """How many decisions of a run in bfloat16 are others than float32 would take from the same activations."""
    import torch

    inputs: list[Any] = []
    theirs = modeling.prepare_attention_input

    def prepare(**given: Any) -> Any:
        result = theirs(**given)
        wide = {name: module.float() for name, module in clones(given).items()}
        exact = theirs(**{**given, **wide, **{name: given[name].float() for name in STATES}})
        inputs.append((result[3], exact[3]))
        return result

    modeling.prepare_attention_input = prepare
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([tokens()]), past_key_values=model.get_cache(), use_cache=True)
    finally:
        modeling.prepare_attention_input = theirs
    different = sum(int((mine != exact.to(mine.dtype)).sum()) for mine, exact in inputs)
    return {"decisions": sum(mine.numel() for mine, _ in inputs), "different": different}


STATES = ("pre_attn_norm_hidden_states", "post_attn_norm_hidden_states", "cos", "sin")


def clones(given: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the modules among the arguments of their function."""
    import copy

    import torch

    return {name: copy.deepcopy(value) for name, value in given.items() if isinstance(value, torch.nn.Module)}


def saved(training: Any, model: Any) -> dict[str, Any]:
    """The checkpoint as their code saves it: config.json, and dtype and shape of every tensor by name."""
    import copy

    from safetensors import safe_open

    nothing = types.SimpleNamespace(save_pretrained=lambda folder: None)
    with tempfile.TemporaryDirectory() as folder:
        training.extract_student_model(
            types.SimpleNamespace(student_model=copy.deepcopy(model)), tokenizer=nothing, save_path=folder
        )
        config = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(Path(folder) / "model.safetensors", framework="pt") as stored:
            kinds = {name: stored.get_slice(name) for name in sorted(stored.keys())}
            tensors = {name: [kind.get_dtype(), kind.get_shape()] for name, kind in kinds.items()}
    return {"config": config, "tensors": tensors}


def run_kvpress(options: Mapping[str, Any]) -> dict[str, Any]:
    """kvpress' DMSPress on the model of a case with adapters, which give its scores: -z of each token itself."""
    import torch
    from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

    kvpress = import_module("kvpress")
    scorer = import_module("kvpress.presses.scorer_press").ScorerPress
    configuration = import_module("models.qwen3.configuration_qwen3_dms")
    modeling = import_module("models.qwen3.modeling_qwen3_dms")
    given = {**SHAPE, "dms_paged_attention_block_size": BLOCK, **options}
    theirs = filled(modeling.Qwen3ForCausalLMDMS(configuration.Qwen3ConfigDMS(**given)))
    model = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "attention_bias": options.get("attention_bias", False)}))
    model = filled(model)
    scale, offset = theirs.config.dms_alpha_scale, theirs.config.dms_initial_alpha_offset
    inputs: dict[int, Any] = {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda module, given, number=number: inputs.update({number: given[0]}))

    class GatePress(scorer):  # type: ignore[misc, valid-type]
        """Scores that are the adapters' logits, turned round: DMSPress evicts what is below its threshold."""

        def score(self, module: Any, *arguments: Any) -> Any:
            own = theirs.model.layers[module.layer_idx].self_attn
            z = own.dms_proj_alpha(own.dms_proj_alpha_norm(inputs[module.layer_idx])) * scale - offset
            return -z.transpose(1, 2)

    window = options["dms_window_size"]
    press = kvpress.DMSPress(GatePress(), threshold=0.0, sliding_window_size=window, decoding=True)
    masked: list[list[list[list[int]]]] = []
    text, cache, parts = torch.tensor([tokens()]), DynamicCache(), []
    with torch.no_grad(), press(model):
        for start, stop in [(0, PROMPT), *((place, place + 1) for place in range(PROMPT, PROMPT + ANSWER))]:
            places = torch.arange(start, stop)
            given = {"past_key_values": cache, "use_cache": True, "cache_position": places}
            parts.append(model(input_ids=text[:, start:stop], **given).logits)
            masked.append([masked_of(layer.self_attn) for layer in model.model.layers])
    logits = torch.cat(parts, dim=1)[0]
    return {"window": window, "masked": masked, "logits": rounded(logits[PROMPT - 1 :].tolist())}


def masked_of(module: Any) -> list[list[int]]:
    """The positions that DMSPress has masked in a layer, by KV head."""
    heads: list[list[int]] = [[] for _ in range(SHAPE["num_key_value_heads"])]
    if module.masked_key_indices is not None:
        _, head, place = module.masked_key_indices
        for at, position in zip(head.tolist(), place.tolist(), strict=True):
            heads[at].append(position)
    return [sorted(head) for head in heads]


def rounded(value: Any) -> Any:
    """Numbers with seven significant digits, in whatever lists they lie."""
    return [rounded(each) for each in value] if isinstance(value, list) else float(f"{value:.7g}")


def header() -> dict[str, Any]:
    """What every file begins with."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "numpy")}
    return {
        "repository": REPOSITORY,
        "commit": COMMIT,
        "licence": "Apache-2.0",
        "command": COMMAND,
        "versions": {"python": sys.version.split()[0], **versions},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.authors.dms", description="Run the authors' DMS.")
    parser.add_argument("--checkout", type=Path, required=True, help=f"{REPOSITORY} at {COMMIT[:12]}")
    parser.add_argument("--kvpress", type=Path, required=True, help=f"{KVPRESS} at {KVPRESS_COMMIT[:12]}")
    parser.add_argument("--out", type=Path, default=Path("tests/authors/data/dms"))
    options = parser.parse_args(arguments)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.path[:0] = [str(options.checkout / "experimental/dms"), str(options.kvpress)]
    stub: Any = types.ModuleType("flash_attn")
    stub.flash_attn_with_kvcache = paged_attention
    attention = import_module_with("dms.attention", flash_attn=stub)
    assert attention.dms_attn_eval_mode.__defaults__[0] is paged_attention
    options.out.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        write(options.out / f"{name}.json", {**header(), **run_case(case)})
    kvpress = {"repository": KVPRESS, "commit": KVPRESS_COMMIT}
    write(options.out / "kvpress.json", {**header(), **kvpress, **run_kvpress(CASES["adapters"])})
    return 0


def import_module_with(name: str, **modules: Any) -> Any:
    """Import a module while these stand in for others."""
    sys.modules.update(modules)
    try:
        return import_module(name)
    finally:
        for module in modules:
            del sys.modules[module]


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file with a line for each field."""
    lines = (f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in content.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    raise SystemExit(main())
