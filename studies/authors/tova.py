"""TOVA's own code on tiny models: `python -m studies.authors.tova --checkout PATH`.

A prompt is read at once and the text goes on token by token, through the repository's TOVACache and its attention.
Needs transformers 4.36. The checkout is a package named TOVA, as its README says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from studies.authors import tiny_llama
from studies.authors.recording import Positions, Watched, checkout, header, write

REPOSITORY, COMMIT, LICENCE = "schwartz-lab-NLP/TOVA", "9c7d09bfff64cfc92cfb5f9d7e138cb04866e5a7", "Apache-2.0"

FILES = ("src/tova_cache.py", "src/convert_models/llama_custom.py", "src/convert_models/convert.py")

CASES = (
    {"kv_heads": 4, "seed": 11, "tokens": 50, "prompt": 38, "size": 12},
    {"kv_heads": 2, "seed": 12, "tokens": 50, "prompt": 38, "size": 20},
    {"kv_heads": 1, "seed": 13, "tokens": 50, "prompt": 9, "size": 16},
)
"""size: entries that the cache is cut to after every pass."""


def run(case: dict[str, Any]) -> dict[str, Any]:
    """A case with what is held and the logits after the prompt and each token behind it, and each cut's scores."""
    import torch
    from TOVA import TOVACache, enable_tova_caching
    from TOVA.src import tova_cache

    model = tiny_llama.build(case["kv_heads"], case["seed"])
    enable_tova_caching(model)
    positions = Positions(model, case["kv_heads"])
    watched = tova_cache.torch = Watched(torch, ["topk"])
    cache = TOVACache(case["size"])
    tokens = torch.tensor([tiny_llama.text(case["tokens"], case["seed"])])
    kept, logits, scores = {}, [], {}
    for seen in range(case["prompt"], case["tokens"] + 1):
        inputs = model.prepare_inputs_for_generation(
            tokens[:, :seen],
            past_key_values=cache,
            attention_mask=torch.ones(1, seen, dtype=torch.long),
            use_cache=True,
        )
        assert inputs["input_ids"].shape[1] == (seen if seen == case["prompt"] else 1)
        assert int(inputs["position_ids"][0, -1]) == seen - 1
        output = model(**inputs)
        logits.append(output.logits[0, -1, : tiny_llama.SHOWN])
        kept[seen] = [layer[0] for layer in positions.of(cache.value_cache)]
        if calls := watched.noted["topk"]:
            scores[seen] = [arguments[0][0] for arguments, _, _ in calls]
            calls.clear()
    few = {seen: scores[seen] for seen in (min(scores), max(scores))}
    return {**case, "logits": torch.stack(logits), "kept": kept, "scores": few}


def main() -> None:
    """Write the numbers."""
    import torch

    torch.set_default_dtype(torch.float64)  # of masks, which would not hold float64's least number otherwise
    folder = checkout("TOVA's own code on tiny models", FILES)
    sys.path[0] = str(folder.parent)
    head = header(REPOSITORY, COMMIT, LICENCE, "studies.authors.tova", folder, FILES)
    write(Path("tova/tova.json"), head, [run(case) for case in CASES])


if __name__ == "__main__":
    main()
