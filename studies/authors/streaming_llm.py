"""StreamingLLM's own code on tiny models: `python -m studies.authors.streaming_llm --checkout PATH`.

As in its eval_long_ppl.py, a text is fed token by token, and after every token the cache is cut to the first and the
last entries. Needs transformers 4.33.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from studies.authors import tiny_llama
from studies.authors.recording import Positions, checkout, header, write

REPOSITORY, COMMIT, LICENCE = "mit-han-lab/streaming-llm", "2e5042606d69933d88fbf909bd77907456b9b4dd", "MIT"

FILES = (
    "streaming_llm/kv_cache.py",
    "streaming_llm/enable_streaming_llm.py",
    "streaming_llm/pos_shift/modify_llama.py",
)

CASES = (
    {"kv_heads": 4, "seed": 1, "tokens": 44, "start": 4, "recent": 11},
    {"kv_heads": 2, "seed": 2, "tokens": 44, "start": 4, "recent": 20},
    {"kv_heads": 1, "seed": 3, "tokens": 44, "start": 1, "recent": 8},
)
"""start, recent: what the cache is cut to after every token."""


def run(case: dict[str, Any]) -> dict[str, Any]:
    """A case with the logits of every token, and what is held after the last."""
    import torch
    from streaming_llm.enable_streaming_llm import enable_streaming_llm

    model = tiny_llama.build(case["kv_heads"], case["seed"])
    positions = Positions(model, case["kv_heads"])
    with contextlib.redirect_stdout(io.StringIO()):
        cut = enable_streaming_llm(model, case["start"], case["recent"])
    past: Any = None
    logits = []
    for token in tiny_llama.text(case["tokens"], case["seed"]):
        output = model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
        past = cut(output.past_key_values)
        logits.append(output.logits[0, -1, : tiny_llama.SHOWN])
    return {**case, "logits": torch.stack(logits), "kept": positions.of([values for _, values in past])}


def main() -> None:
    """Write the numbers."""
    folder = checkout("StreamingLLM's own code on tiny models", FILES)
    head = header(REPOSITORY, COMMIT, LICENCE, "studies.authors.streaming_llm", folder, FILES)
    write(Path("streaming_llm/streaming_llm.json"), head, [run(case) for case in CASES])


if __name__ == "__main__":
    main()
