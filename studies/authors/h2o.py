"""H2O's own code on tiny models: `python -m studies.authors.h2o --checkout PATH`.

The repository holds three implementations, and all are run. `real_drop` (utils_real_drop) takes entries out of the
cache; its `streaming` variant also rotates inside the cache. `masked` (utils_hh, text generation) hides entries.
`likelihood` (utils_lm_eval, the tables' lm-eval tasks) hides entries from a text that is read at once, and chooses the
heavy hitters from all of its queries. Needs transformers 4.33.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from pathlib import Path
from typing import Any

from studies.authors import tiny_llama
from studies.authors.recording import Positions, checkout, header, write

REPOSITORY, COMMIT = "FMInference/H2O", "ac75c2a8a9e76832b2a4139b9363373b56336bfb"

LICENCE = "MIT, by the README's badge; the repository has no licence file"

FILES = tuple(f"h2o_hf/{folder}/modify_llama.py" for folder in ("utils_real_drop", "utils_hh", "utils_lm_eval"))

CASES = (
    {"code": "real_drop", "seed": 21, "tokens": 52, "prompt": 40, "heavy": 9, "recent": 8},
    {"code": "real_drop", "seed": 22, "tokens": 52, "prompt": 40, "heavy": 14, "recent": 12},
    {"code": "real_drop", "seed": 23, "tokens": 32, "prompt": 12, "heavy": 12, "recent": 11},
    {"code": "real_drop", "seed": 24, "tokens": 52, "prompt": 40, "heavy": 8, "recent": 8},
    {"code": "streaming", "seed": 21, "tokens": 52, "prompt": 40, "heavy": 9, "recent": 8},
    {"code": "masked", "seed": 21, "tokens": 52, "prompt": 40, "heavy": 9, "recent": 9},
    {"code": "likelihood", "seed": 21, "tokens": 52, "prompt": 52, "heavy": 9, "recent": 9},
)
"""heavy, recent: entries kept for their attention, and as the most recent. All have a KV head for each query head."""

KV_HEADS = tiny_llama.HEADS


def real_drop(case: dict[str, Any]) -> dict[str, Any]:
    """What is held and the logits after the prompt and each token behind it; scores after the first and last pass."""
    import torch
    from h2o_hf.utils_real_drop import modify_llama

    name = "H2OLlamaForCausalLM" + ("_streaming" if case["code"] == "streaming" else "")
    config = modify_llama.LlamaConfig(**tiny_llama.settings(KV_HEADS))
    config.hh_size, config.recent_size = case["heavy"], case["recent"]
    with contextlib.redirect_stdout(io.StringIO()):
        model = tiny_llama.with_weights(getattr(modify_llama, name)(config), case["seed"])
    positions = Positions(model, KV_HEADS)
    tokens = torch.tensor([tiny_llama.text(case["tokens"], case["seed"])])
    past, kept, logits, scores = None, {}, [], {}
    for seen in range(case["prompt"], case["tokens"] + 1):
        start = 0 if past is None else seen - 1
        output = model(
            tokens[:, start:seen],
            past_key_values=past,
            position_ids=torch.arange(start, seen)[None],
            use_cache=True,
        )
        past = output.past_key_values
        logits.append(output.logits[0, -1, : tiny_llama.SHOWN])
        kept[seen] = positions.of([values for _, values in past])
        if seen in (case["prompt"], case["tokens"]):
            scores[seen] = [layer.self_attn.kv_cache.hh_score for layer in model.model.layers]
    return {"logits": torch.stack(logits), "kept": kept, "scores": scores}


def masked(case: dict[str, Any]) -> dict[str, Any]:
    """What the query behind each pass will see without itself, and the logits, as in `real_drop`."""
    import torch

    model = _hiding("utils_hh", case)
    tokens = torch.tensor([tiny_llama.text(case["tokens"], case["seed"])])
    past, kept, logits = None, {}, []
    for seen in range(case["prompt"], case["tokens"] + 1):
        output = model(tokens[:, 0 if past is None else seen - 1 : seen], past_key_values=past, use_cache=True)
        past = output.past_key_values
        logits.append(output.logits[0, -1, : tiny_llama.SHOWN])
        masks = [layer.self_attn.attention_masks_next[0, :, 0, :-1] for layer in model.model.layers]
        kept[seen] = [[row.nonzero().flatten() for row in mask] for mask in masks]
    return {"logits": torch.stack(logits), "kept": kept}


def likelihood(case: dict[str, Any]) -> dict[str, Any]:
    """The logits of every token, and what the last query saw without itself."""
    import torch

    model = _hiding("utils_lm_eval", case)
    tokens = torch.tensor([tiny_llama.text(case["tokens"], case["seed"])])
    output = model(tokens, output_attentions=True)
    kept = [[row[-1, :-1].nonzero().flatten() for row in probabilities[0]] for probabilities in output.attentions]
    return {"logits": output.logits[0, :, : tiny_llama.SHOWN], "kept": {case["tokens"] - 1: kept}}


def _hiding(folder: str, case: dict[str, Any]) -> Any:
    """A tiny model that hides entries, with the code of a folder; its shares are of the prompt's length."""
    code = importlib.import_module(f"h2o_hf.{folder}.modify_llama")
    model = tiny_llama.build(KV_HEADS, case["seed"])
    for name in ("heavy", "recent"):
        setattr(model.config, f"{name}_ratio", (case[name] + 0.5) / case["prompt"])
    return tiny_llama.with_weights(code.convert_kvcache_llama_heavy_recent(model, model.config), case["seed"])


def main() -> None:
    """Write the numbers."""
    import torch

    torch.set_default_dtype(torch.float64)  # of masks, which would not hold float64's least number otherwise
    folder = checkout("H2O's own code on tiny models", FILES)
    head = header(REPOSITORY, COMMIT, LICENCE, "studies.authors.h2o", folder, FILES)
    codes = {"real_drop": real_drop, "streaming": real_drop, "masked": masked, "likelihood": likelihood}
    write(Path("h2o/h2o.json"), head, [{**case, **codes[str(case["code"])](case)} for case in CASES])


if __name__ == "__main__":
    main()
