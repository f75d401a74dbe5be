"""The authors' IndexMem++ on tiny models and drawn tensors: what it scores, divides, keeps and predicts, as numbers.

    pip install torch==2.13.0 transformers==4.57.3
    python -m studies.authors.indexmem_pp --checkout CHECKOUT [--out tests/authors/data/indexmem_pp]

CHECKOUT holds `kvpress/indexmem` of their repository. It needs an environment of its own and nothing of evictbench. The
weights are drawn by a rule (`drawn`), so that no file of weights is needed to make a model again. Models are float64;
where their code goes to float32 it does here.

Not theirs: flash-attn's two functions are `paged_attention` and `causal_attention` below, which do the same sums on the
CPU; FlexAttention runs uncompiled; their Triton kernel for a masked decode step is not called. Scores, head budgets,
deadlines, masks, the pool, centroids and the order of calls are theirs. The answer's tokens are given and not drawn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

REPOSITORY, COMMIT = "Chooovy/kvpress", "5a5826ed08f06349dc2f7d9d81b33cef8adfb6d5"
COMMAND = "python -m studies.authors.indexmem_pp --checkout CHECKOUT"

VOCABULARY, WIDTH, ANSWER = 20, 12, 16
"""Tokens of the tiny models, width of their scorers, and tokens after a prompt and a question."""


@dataclass(frozen=True)
class Case:
    """A tiny model and how it is run. budget: entries of a head, sinks, window and centroids included. floor: as their
    `min_head_budget`. question: tokens after the prompt that come in one pass. table: head budgets by layer."""

    kind: str
    layers: int
    heads: int
    kv_heads: int
    prompt: int
    budget: int
    centroids: int
    floor: int
    question: int = 0
    sinks: int = 2
    window: int = 8
    budgets: str = "mass"
    table: tuple[tuple[int, ...], ...] | None = None

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self.prompt + self.question + ANSWER


CASES: Mapping[str, Case] = {
    "mass": Case("qwen3", 2, 4, 2, prompt=72, budget=36, centroids=6, floor=8),
    "mass_llama": Case("llama", 2, 8, 4, prompt=96, budget=32, centroids=0, floor=4),
    "uniform": Case("qwen3", 2, 4, 2, prompt=72, budget=36, centroids=6, floor=8, budgets="uniform"),
    "static": Case(
        "qwen3", 2, 4, 2, prompt=72, budget=36, centroids=0, floor=8, budgets="static", table=((24, 48), (43, 29))
    ),
    "fits": Case("qwen3", 2, 4, 2, prompt=34, budget=36, centroids=6, floor=8),
    "question": Case("qwen3", 2, 4, 2, prompt=72, budget=36, centroids=6, floor=8, question=9),
}

DIVISIONS: Sequence[tuple[int, int, int, int, int, float]] = [
    (2, 2, 60, 20, 0, 1.0),
    (4, 1, 80, 40, 5, 1.0),
    (4, 2, 120, 30, 8, 3.0),
    (8, 4, 200, 60, 15, 2.0),
    (8, 1, 300, 100, 25, 4.0),
    (3, 3, 200, 150, 37, 0.3),
    (2, 2, 40, 11, 100, 1.0),
    (4, 2, 600, 500, 125, 6.0),
]
"""Head budgets on drawn tensors: KV heads, query heads of each, entries, budget, floor, and how sharp attention is."""

DIVISION_SINKS, DIVISION_WINDOW = 2, 6

DEADLINES: Sequence[tuple[int, tuple[int, ...], int, int]] = [
    (50, (10, 14), 2, 4),
    (150, (20, 9, 60), 1, 6),
    (300, (40, 100), 4, 16),
    (70, (12, 12), 0, 1),
]
"""Deadlines on drawn scores: entries, budgets of the heads, sinks and window."""


def tokens(case: Case) -> list[int]:
    """The text of a case."""
    return [(7 * place * place % 11 + place * 5 % 9) % VOCABULARY for place in range(case.length)]


def normal(name: str, *shape: int) -> np.ndarray:
    """Numbers drawn by a name, float64 numbers that bfloat16 holds."""
    import numpy as np

    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def drawn(name: str, shape: Sequence[int]) -> np.ndarray:
    """A tensor of a tiny model or of a scorer. Scores spread over units and fall by as much within tens of positions,
    so that ranks cross within a text of a hundred tokens."""
    values = normal(name, *shape)
    if "retention_proj" in name:
        return abs(values) * 1024 if name.endswith("bias") else values * 512
    if name.endswith("norm.weight"):
        return 1 + 0.25 * values
    if name.endswith("gate_scale"):
        return abs(values)
    if "embed_tokens" in name:
        return values
    return values * (0.5 if "q_proj" in name or "k_proj" in name else 0.25)


def config_of(case: Case) -> dict[str, Any]:
    """The arguments of the model's config."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_theta": 1000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def scorer_config(case: Case) -> dict[str, Any]:
    """The scorer's config, every field that their checkpoints state."""
    return {
        "kind": "mlp",
        "hidden_size": 32,
        "n_heads": case.kv_heads,
        "mid_dim": WIDTH,
        "norm_eps": 1e-5,
        "pos_slope": 1e-6,
        "gate_scale": True,
        "decay": True,
        "age_scale": 16384.0,
        "decay_init": -1.0,
    }


def model_of(case: Case) -> Any:
    """The tiny model of a case in float64, without scorers."""
    import transformers

    names = {"qwen3": "Qwen3", "llama": "Llama"}
    config = getattr(transformers, f"{names[case.kind]}Config")(**config_of(case))
    return filled(getattr(transformers, f"{names[case.kind]}ForCausalLM")(config).double().eval())


def filled(module: Any) -> Any:
    """The module with every parameter from `drawn`."""
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(drawn(name, parameter.shape)))
    return module


def paged_attention(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    *,
    cache_seqlens: Any,
    block_table: Any,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool,
) -> tuple[Any, Any]:
    """flash-attn's `flash_attn_with_kvcache` on the CPU. query: `[rows, queries, heads, head_dim]`."""
    import torch

    assert not causal
    assert return_softmax_lse
    output, lse = torch.zeros_like(query), query.new_zeros((query.shape[0], query.shape[2], query.shape[1]))
    for row, length in enumerate(cache_seqlens.tolist()):
        pages = block_table[row].long()
        keys, values = (held[pages].flatten(0, 1)[:length, 0] for held in (key_pages, value_pages))
        scores = torch.einsum("qhd,kd->hqk", query[row], keys) * softmax_scale
        output[row], lse[row] = torch.einsum("hqk,kd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)
    return output, lse


def causal_attention(
    query: Any, key: Any, value: Any, *, causal: bool, softmax_scale: float, return_attn_probs: bool
) -> tuple[Any, Any, None]:
    """flash-attn's `flash_attn_func` on the CPU. query: `[rows, queries, heads, head_dim]`."""
    import torch

    assert causal
    assert return_attn_probs
    group = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
    scores = torch.einsum("rqhd,rkhd->rhqk", query, key) * softmax_scale
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("rhqk,rkhd->rqhd", scores.softmax(-1), value), scores.logsumexp(-1), None


def open_checkout(checkout: Path) -> None:
    """Make `kvpress.indexmem` importable without the rest of kvpress, flash-attn and Triton."""
    for kind in ("llama", "qwen3"):  # before there is something that they take for flash-attn
        import_module(f"transformers.models.{kind}.modeling_{kind}")
    for name in ("kvpress", "kvpress.indexmem"):
        package: Any = types.ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = package
    kernel: Any = types.ModuleType("kvpress.indexmem.kernels.sparse_attention")
    kernel.sparse_gqa_attention = None
    sys.modules[kernel.__name__] = kernel
    flash: Any = types.ModuleType("flash_attn")
    flash.flash_attn_with_kvcache, flash.flash_attn_func = paged_attention, causal_attention
    sys.modules["flash_attn"] = flash
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    masks: Any = import_module("kvpress.indexmem.kernels.prefill_attention")
    masks._flex_compiled, masks._block_mask_compiled = flex_attention, create_block_mask


@contextmanager
def noted(module: Any, name: str, calls: list[Any]) -> Iterator[None]:
    """Inside, a function of a module notes what it returns."""
    theirs = getattr(module, name)

    def noting(*given: Any, **named: Any) -> Any:
        result = theirs(*given, **named)
        calls.append(result)
        return result

    setattr(module, name, noting)
    try:
        yield
    finally:
        setattr(module, name, theirs)


def run_case(case: Case) -> dict[str, Any]:
    """The prompt in one pass, the question in one, the answer token by token."""
    import torch

    checkpoint = import_module("kvpress.indexmem.checkpoint")
    configuration = import_module("kvpress.indexmem.config")
    context = import_module("kvpress.indexmem.inference.context")
    masks = import_module("kvpress.indexmem.kernels.prefill_attention")
    prefill = import_module("kvpress.indexmem.inference.prefill")
    model = model_of(case)
    checkpoint.attach_scorers(model, scorer_config(case))
    for layer, scorer in enumerate(checkpoint.scorer_modules(model)):
        named = {f"{layer}.{name}": parameter for name, parameter in scorer.named_parameters()}
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(torch.from_numpy(drawn(name, parameter.shape)))
    text = torch.tensor([tokens(case)])
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.pt"
        torch.save({"table": torch.tensor(case.table or ())}, table)
        config = configuration.IndexMemConfig(
            cache_budget=case.budget,
            sink_size=case.sinks,
            window_size=case.window,
            cmp_slots=case.centroids,
            head_budget=case.budgets,
            head_budget_table=str(table),
            min_head_budget=case.floor,
        )
        deadlines: list[Any] = []
        starts: list[Any] = []
        contexts: list[Any] = []
        torch.manual_seed(0)
        with (
            noted(context, "PrefillContext", contexts),
            noted(masks, "deadlines", deadlines),
            noted(torch, "multinomial", starts),
            context.IndexMemInferenceContext(model, config, batch_size=1) as run,
        ):
            found = _read_text(model, run, text, case, contexts, deadlines)
    assert isinstance(contexts[0], prefill.PrefillContext)
    return {"case": vars(case), **found, "starts": [each.tolist() for each in starts]}


def _read_text(
    model: Any, run: Any, text: Any, case: Case, contexts: list[Any], deadlines: list[Any]
) -> dict[str, Any]:
    import torch

    hidden: list[Any] = []
    keys: list[Any] = []
    head = model.model.register_forward_hook(lambda module, given, output: hidden.append(output[0]))
    theirs = run._ensure_pool

    def ensure(prefill: Any) -> None:
        keys.extend(prefill._k_idx[layer].clone() for layer in range(case.layers))
        theirs(prefill)

    run._ensure_pool = ensure
    run.prefill_and_commit(text[:, : case.prompt])
    head.remove()
    prompt_logits = model.lm_head(hidden[0])[0]
    intercepts = [packed[0, :, 0::2].T for packed in keys]
    rates = [packed[0, :, 1::2].T for packed in keys]
    budgets = run.pool.budgets + case.centroids
    masked = [each.tolist() for each in deadlines[: case.layers]] if case.prompt >= case.sinks + case.window else []
    centroids = _centroids(run, case)
    seen, counts, logits = [_held(run, case)], [_counts(run, case)], []
    run.activate()
    cache = run.new_cache()
    borders = [case.prompt, *range(case.prompt + case.question, case.length + 1)]
    if case.question == 0:
        borders = list(range(case.prompt, case.length + 1))
    with torch.no_grad():
        for start, stop in itertools.pairwise(borders):
            positions = torch.arange(start, stop)[None]
            output = model(input_ids=text[:, start:stop], past_key_values=cache, position_ids=positions).logits
            logits += output[0].tolist()
            run.finish_step()
            seen.append(_held(run, case))
            counts.append(_counts(run, case))
    return {
        "score": rounded([each.tolist() for each in intercepts], 5),
        "rate": rounded([each.tolist() for each in rates], 5),
        "budgets": budgets.tolist(),
        "deadlines": masked,
        "prompt_logits": rounded(prompt_logits[-8:].tolist()),
        "centroids": rounded(centroids),
        "logits": rounded(logits),
        "held": seen,
        "counts": counts,
    }


def _rows(run: Any, case: Case) -> list[list[int]]:
    return [
        list(range(run.pool.rows_for(layer, 0).start, run.pool.rows_for(layer, 0).stop)) for layer in range(case.layers)
    ]


def _held(run: Any, case: Case) -> list[list[list[int]]]:
    """The positions that each layer's heads hold, sinks, pool and ring."""
    pool, sinks = run.pool, list(range(case.sinks))
    return [
        [sorted({*sinks, *(int(p) for p in (*pool.pool_pos[row], *pool.ring_pos[row]) if p >= 0)}) for row in rows]
        for rows in _rows(run, case)
    ]


def _counts(run: Any, case: Case) -> list[list[list[int]]]:
    """How many entries each head's centroids stand for."""
    if run.cmp is None:
        return []
    return [[[int(n) for n in run.cmp.cluster_counts[row]] for row in rows] for rows in _rows(run, case)]


def _centroids(run: Any, case: Case) -> list[Any]:
    """Keys of each head's centroids at the prompt's end."""
    if run.cmp is None:
        return []
    return [[run.cmp.centroid_keys[row].tolist() for row in rows] for rows in _rows(run, case)]


def division(number: int) -> tuple[Any, Any, Any]:
    """The drawn query `[1, heads, 1, 8]`, keys `[1, kv_heads, entries, 8]` and scores of one of `DIVISIONS`."""
    import torch

    kv_heads, group, entries, _, _, sharp = DIVISIONS[number]
    query = torch.from_numpy(normal(f"query {number}", 1, kv_heads * group, 1, 8)).float() * sharp
    keys = torch.from_numpy(normal(f"keys {number}", 1, kv_heads, entries, 8)).float()
    return query, keys, torch.from_numpy(normal(f"scores {number}", kv_heads, entries)).float()


def run_divisions() -> list[list[int]]:
    """Head budgets on drawn tensors."""
    budget = import_module("kvpress.indexmem.inference.budget")
    found = []
    for number, (_, _, _, total, floor, _) in enumerate(DIVISIONS):
        query, keys, scores = division(number)
        found.append(
            budget.mass_head_budgets(
                query,
                keys,
                scores,
                cache_budget=total,
                sink_size=DIVISION_SINKS,
                window_size=DIVISION_WINDOW,
                scaling=8**-0.5,
                floor=floor,
            ).tolist()
        )
    return found


def deadline_scores(number: int) -> Any:
    """The drawn scores `[heads, entries]` of one of `DEADLINES`; the last ones are whole numbers, with many ties."""
    import torch

    entries, budgets, _, _ = DEADLINES[number]
    scores = torch.from_numpy(normal(f"deadlines {number}", len(budgets), entries)).float()
    return scores.round() if number == len(DEADLINES) - 1 else scores


def run_deadlines() -> list[list[list[int]]]:
    """Deadlines on drawn scores."""
    import torch

    masks = import_module("kvpress.indexmem.kernels.prefill_attention")
    return [
        masks.deadlines(deadline_scores(number), torch.tensor(budgets), sink_size=sinks, window_size=window).tolist()
        for number, (_, budgets, sinks, window) in enumerate(DEADLINES)
    ]


def run_checkpoint() -> dict[str, Any]:
    """What their code saves: the scorer's config, and dtype and shape of every tensor by name."""
    import torch

    checkpoint = import_module("kvpress.indexmem.checkpoint")
    case = CASES["mass"]
    model = model_of(case).bfloat16()
    checkpoint.attach_scorers(model, scorer_config(case))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save_scorer_checkpoint(Path(folder) / "indexmem.pt", model, {"kind": "mlp"}, step=600)
        payload = torch.load(Path(folder) / "indexmem.pt", weights_only=True)
    named = {name: [str(each.dtype), list(each.shape)] for name, each in payload["scorers"].items()}
    return {"keys": sorted(payload), "scorer_config": payload["scorer_config"], "step": 600, "scorers": named}


def run_narrow() -> dict[str, int]:
    """How many entries a pool of 256 of 2,048 keeps otherwise where scores are computed in bfloat16 and not float32."""
    import torch

    checkpoint = import_module("kvpress.indexmem.checkpoint")
    scorer = checkpoint.make_scorer({**scorer_config(CASES["mass"]), "mid_dim": 256}).eval()
    with torch.no_grad():
        for name, parameter in scorer.named_parameters():
            if "retention_proj" not in name:  # which stays as training starts from
                parameter.copy_(torch.from_numpy(drawn(f"narrow.{name}", parameter.shape)))
        hidden = torch.from_numpy(normal("narrow", 1, 2048, 32)).bfloat16()
        ranked = []
        for dtype in (torch.float32, torch.bfloat16):
            packed = scorer.to(dtype).project_k(hidden.to(dtype), key_offset=0)
            query = scorer.project_q(hidden.to(dtype), n_kv_heads=2)[:, :, -1:]
            score = torch.einsum("bhqd,bkd->bhk", query, packed)[0].float()
            ranked.append(score.argsort(dim=-1, descending=True, stable=True)[:, :256])
    different = sum(len(set(a.tolist()) - set(b.tolist())) for a, b in zip(*ranked, strict=True))
    return {"kept": ranked[0].numel(), "different": different}


def rounded(value: Any, digits: int = 7) -> Any:
    """Numbers with so many digits after the point."""
    if isinstance(value, float):
        return round(value, digits)
    return [rounded(item, digits) for item in value] if isinstance(value, (list, tuple)) else value


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m studies.authors.indexmem_pp", description=__doc__)
    parser.add_argument("--checkout", type=Path, required=True, help="a folder with kvpress/indexmem at the commit")
    parser.add_argument("--out", type=Path, default=Path("tests/authors/data/indexmem_pp"))
    options = parser.parse_args()
    open_checkout(options.checkout)
    header = {
        "repository": f"https://github.com/{REPOSITORY}",
        "commit": COMMIT,
        "licence": "Apache-2.0",
        "command": COMMAND,
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    functions = {
        "divisions": run_divisions(),
        "deadlines": run_deadlines(),
        "checkpoint": run_checkpoint(),
        "bfloat16": run_narrow(),
    }
    files = {"functions": functions, **{name: run_case(case) for name, case in CASES.items()}}
    for name, numbers in files.items():
        content = json.dumps({"header": header, **numbers}, separators=(",", ":"))
        (options.out / f"{name}.json").write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
