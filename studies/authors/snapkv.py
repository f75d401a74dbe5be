"""SnapKV's own code on tiny models: `python -m studies.authors.snapkv --checkout PATH`.

A prompt is read at once and the text goes on token by token. The repository replaces the forward pass of Llama's flash
attention; the kernel under it, which needs a GPU, is replaced here by the same attention in plain torch. Needs
transformers 4.37.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from studies.authors import tiny_llama
from studies.authors.recording import Positions, Watched, checkout, header, write

REPOSITORY, COMMIT, LICENCE = "FasterDecoding/SnapKV", "e216ddc84c5bd210378cbdbbba12ba02102aa640", "Apache-2.0"

FILES = tuple(f"snapkv/monkeypatch/{name}.py" for name in ("monkeypatch", "snapkv_utils", "llama_hijack_4_37"))

CASES = (
    {"kv_heads": 4, "seed": 31, "tokens": 52, "prompt": 44, "window": 6, "kernel": 5, "pool": "avg", "size": 16},
    {"kv_heads": 4, "seed": 32, "tokens": 52, "prompt": 44, "window": 8, "kernel": 7, "pool": "max", "size": 20},
    {"kv_heads": 4, "seed": 33, "tokens": 52, "prompt": 44, "window": 6, "kernel": 3, "pool": "max", "size": 44},
    {"kv_heads": 4, "seed": 34, "tokens": 52, "prompt": 19, "window": 6, "kernel": 5, "pool": "avg", "size": 20},
    {"kv_heads": 2, "seed": 35, "tokens": 52, "prompt": 44, "window": 6, "kernel": 5, "pool": "avg", "size": 16},
    {"kv_heads": 2, "seed": 36, "tokens": 52, "prompt": 44, "window": 8, "kernel": 7, "pool": "max", "size": 20},
)
"""size: entries that the prompt is cut to, the window's among them."""


def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, length: int, dropout: float = 0.0) -> Any:
    """Causal attention of tensors `[rows, tokens, heads, head_dim]`; the last query sees every key."""
    import torch

    assert mask is None
    assert dropout == 0.0
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(scores.shape[-1] - scores.shape[-2] + 1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """What each query head holds and the logits after the prompt and each token behind it, and each head's pooled votes
    for the entries in front of the window."""
    import torch
    from snapkv.monkeypatch import snapkv_utils
    from snapkv.monkeypatch.monkeypatch import replace_llama
    from transformers.models.llama import modeling_llama as transformers_llama

    modeling_llama: Any = transformers_llama
    replace_llama()
    modeling_llama.LlamaFlashAttention2._flash_attention_forward = attention
    modeling_llama.is_flash_attn_greater_or_equal_2_10 = lambda: True
    model = tiny_llama.build(case["kv_heads"], case["seed"])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = modeling_llama.LlamaFlashAttention2(model.config, index)
    model = tiny_llama.with_weights(model, case["seed"])
    model.model._use_flash_attention_2 = True
    model.config.window_size, model.config.kernel_size = case["window"], case["kernel"]
    model.config.max_capacity_prompt, model.config.pooling = case["size"], f"{case['pool']}pool"
    positions = Positions(model, case["kv_heads"])
    watched = snapkv_utils.F = Watched(torch.nn.functional, ["avg_pool1d", "max_pool1d"])
    tokens = torch.tensor([tiny_llama.text(case["tokens"], case["seed"])])
    past, kept, logits = None, {}, []
    for seen in range(case["prompt"], case["tokens"] + 1):
        inputs = model.prepare_inputs_for_generation(
            tokens[:, :seen], past_key_values=past, attention_mask=torch.ones(1, seen, dtype=torch.long), use_cache=True
        )
        assert int(inputs["position_ids"][0, -1]) == seen - 1
        output = model(**inputs)
        past = output.past_key_values
        logits.append(output.logits[0, -1, : tiny_llama.SHOWN])
        kept[seen] = positions.of([values for _, values in past])
    votes = [result[0] for _, _, result in watched.noted[f"{case['pool']}_pool1d"]]
    held = {seen: kept[seen] for seen in (case["prompt"], case["tokens"])}
    return {**case, "logits": torch.stack(logits), "kept": held, "votes": votes}


def main() -> None:
    """Write the numbers."""
    import torch

    torch.set_default_dtype(torch.float64)  # of masks, which would not hold float64's least number otherwise
    folder = checkout("SnapKV's own code on tiny models", FILES)
    head = header(REPOSITORY, COMMIT, LICENCE, "studies.authors.snapkv", folder, FILES)
    write(Path("snapkv/snapkv.json"), head, [run(case) for case in CASES])


if __name__ == "__main__":
    main()
