"""kvpress' presses of the policies' names on tiny models: `python -m studies.authors.kvpress_presses --checkout PATH`.

A prompt is read at once and cut by the press, and the text goes on token by token, as in kvpress' pipeline: at the
text's own positions, or behind the cached entries under KeyRerotationPress. Presses cut at the prompt's end alone, so
that the cache grows afterwards; TOVA is also run through kvpress' presses for decoding, which cut after every token.
Needs transformers 5.2 and what kvpress itself needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from studies.authors import tiny_llama
from studies.authors.recording import Positions, checkout, header, write

REPOSITORY, COMMIT, LICENCE = "NVIDIA/kvpress", "8bb29b9c3078452a86d692f29123fa6c793e2b05", "Apache-2.0"

FILES = tuple(
    f"kvpress/presses/{name}_press.py"
    for name in (
        "base",
        "scorer",
        "streaming_llm",
        "key_rerotation",
        "tova",
        "snapkv",
        "decoding",
        "prefill_decoding",
    )
)

TEXT = {"tokens": 52, "prompt": 44}

CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "streaming_llm": (
        {"kv_heads": 2, "seed": 41, **TEXT, "size": 16, "sinks": 4, "rotated": False, "attention": "sdpa"},
        {"kv_heads": 2, "seed": 42, **TEXT, "size": 22, "sinks": 4, "rotated": True, "attention": "sdpa"},
    ),
    "tova": (
        {"kv_heads": 4, "seed": 43, **TEXT, "size": 12, "decoding": False, "attention": "eager"},
        {"kv_heads": 2, "seed": 44, **TEXT, "size": 20, "decoding": False, "attention": "sdpa"},
        {"kv_heads": 2, "seed": 45, **TEXT, "size": 20, "decoding": True, "attention": "eager"},
        {"kv_heads": 1, "seed": 46, **TEXT, "size": 5, "decoding": True, "attention": "eager"},
        {"kv_heads": 4, "seed": 67, **TEXT, "size": 24, "decoding": False, "attention": "sdpa"},
    ),
    "snapkv": (
        {"kv_heads": 4, "seed": 47, **TEXT, "size": 16, "window": 6, "kernel": 5, "attention": "eager"},
        {"kv_heads": 2, "seed": 48, **TEXT, "size": 20, "window": 8, "kernel": 3, "attention": "sdpa"},
        {"kv_heads": 1, "seed": 49, **TEXT, "size": 16, "window": 6, "kernel": 5, "attention": "sdpa"},
    ),
}
"""By policy. size: entries that a cut leaves. decoding: whether the cache is cut after every token too."""


def press(policy: str, case: dict[str, Any]) -> Any:
    """The press of a case; its ratio is the one that leaves the case's entries."""
    import kvpress

    ratio = 1 - (case["size"] + 0.5) / case["prompt"]
    if policy == "streaming_llm":
        plain = kvpress.StreamingLLMPress(ratio, n_sink=case["sinks"])
        return kvpress.KeyRerotationPress(plain) if case["rotated"] else plain
    if policy == "snapkv":
        return kvpress.SnapKVPress(ratio, window_size=case["window"], kernel_size=case["kernel"])
    if not case["decoding"]:
        return kvpress.TOVAPress(ratio)
    later = kvpress.DecodingPress(kvpress.TOVAPress(), compression_interval=1, target_size=case["size"])
    return kvpress.PrefillDecodingPress(kvpress.TOVAPress(ratio), later)


def run(policy: str, case: dict[str, Any]) -> dict[str, Any]:
    """A case with what is held and the logits after the prompt and each token behind it."""
    import torch
    from transformers import DynamicCache

    model = tiny_llama.build(case["kv_heads"], case["seed"], case["attention"])
    positions = Positions(model, case["kv_heads"])
    tokens = torch.tensor([tiny_llama.text(case["tokens"], case["seed"])])
    cache: Any = DynamicCache()
    kept: dict[int, Any] = {}
    logits = []
    with press(policy, case)(model):
        for seen in range(case["prompt"], case["tokens"] + 1):
            start = seen - 1 if kept else 0
            place = cache.get_seq_length() if case.get("rotated") else start
            output = model(
                tokens[:, start:seen],
                past_key_values=cache,
                position_ids=torch.arange(place, place + seen - start)[None],
            )
            logits.append(output.logits[0, -1, : tiny_llama.SHOWN])
            kept[seen] = positions.of([layer.values for layer in cache.layers])
    every = case.get("decoding", False)
    return {**case, "logits": torch.stack(logits), "kept": kept if every else {case["prompt"]: kept[case["prompt"]]}}


def main() -> None:
    """Write the numbers of every policy."""
    folder = checkout("kvpress' presses on tiny models", FILES)
    head = header(REPOSITORY, COMMIT, LICENCE, "studies.authors.kvpress_presses", folder, FILES)
    for policy, cases in CASES.items():
        write(Path(policy) / "kvpress.json", head, [run(policy, case) for case in cases])


if __name__ == "__main__":
    main()
