"""Hidden states read by hooks: what is handed over, what is changed, and that nothing stays behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from evictbench.cache import attention
from evictbench.cache.hooks import hooked
from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.policies.dms import DMS, Settings
from evictbench.policies.streaming_llm import StreamingLLM
from evictbench.policy.step import ACTIVATIONS, Activation

pytestmark = pytest.mark.engine

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "sliding_window": None,
    "pad_token_id": None,
}
FAMILIES = ["llama", "qwen3", "mistral", "phi3"]
TOKENS = torch.tensor([[3, 14, 15, 92, 65, 35], [8, 9, 79, 32, 38, 46]])


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES)).double().eval()
    attention.use(model)
    return model


def forward(model: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=TOKENS, use_cache=False, **options).logits
    return logits


def hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def rotated(model: Any, queries: torch.Tensor) -> torch.Tensor:
    """Queries `[rows, queries, heads, head_dim]` turned by the model's own rotation."""
    import sys

    cos, sin = model.model.rotary_emb(queries, position_ids=torch.arange(queries.shape[1])[None])
    turn = sys.modules[type(model).__module__].apply_rotary_pos_emb
    result: torch.Tensor = turn(queries.transpose(1, 2), queries.transpose(1, 2), cos, sin)[0]
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_handed_over_is_what_the_layers_work_with(family: str) -> None:
    model = model_of(family)
    found: dict[tuple[str, int], torch.Tensor] = {}
    attended: dict[int, torch.Tensor] = {}

    def watch(layer: int, module: Any, query: torch.Tensor, *others: Any) -> None:
        attended[layer] = query

    with hooked(model, ACTIVATIONS, lambda layer, name, tensor: found.__setitem__((name, layer), tensor.clone())):
        forward(model, dense_attention=watch)
    hidden = model(input_ids=TOKENS, use_cache=False, output_hidden_states=True).hidden_states
    for index, layer in enumerate(model.model.layers):
        assert torch.equal(found["residual", index], hidden[index])
        assert torch.equal(found["normed_hidden", index], layer.input_layernorm(hidden[index]))
        queries = found["pre_rope_queries", index]
        assert queries.shape == (2, 6, 4, 16)
        torch.testing.assert_close(rotated(model, queries), attended[index], atol=1e-6, rtol=0)
    assert len(found) == 3 * len(model.model.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_can_be_changed_and_nothing_else(family: str) -> None:
    model = model_of(family)
    attended: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def watch(
        layer: int, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: Any
    ) -> None:
        if layer == 0:
            attended.append((query, key, value))

    def half(layer: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:, :, :1] * 0, tensor[:, :, 1:]], dim=2)

    plain = forward(model, dense_attention=watch)
    with hooked(model, {"pre_rope_queries"}, half):
        changed = forward(model, dense_attention=watch)
    (query, key, value), (query_changed, key_changed, value_changed) = attended
    assert query_changed[:, 0].abs().max() == 0 < query[:, 0].abs().max()
    assert torch.equal(query_changed[:, 1:], query[:, 1:])
    assert torch.equal(key_changed, key)
    assert torch.equal(value_changed, value)
    assert not torch.allclose(changed, plain)
    assert torch.equal(forward(model), plain)


def test_hooks_are_set_for_what_is_asked_and_always_removed() -> None:
    model = model_of("llama")
    assert hooks(model) == 0
    with hooked(model, {"residual"}, lambda *_: None):
        assert hooks(model) == 2
    with hooked(model, (), lambda *_: None):
        assert hooks(model) == 0
    with pytest.raises(KeyError), hooked(model, ACTIVATIONS, lambda *_: None):
        raise KeyError
    assert hooks(model) == 0


def test_the_input_of_a_checkpointed_layer_is_handed_over_with_its_graph() -> None:
    model = model_of("llama")
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found: dict[int, torch.Tensor] = {}
    start = torch.zeros((), dtype=torch.float64, requires_grad=True)
    embedded = model.get_input_embeddings()(TOKENS).detach() * (1 + start)
    with hooked(model, {"residual"}, lambda layer, name, tensor: found.__setitem__(layer, tensor)):
        model(inputs_embeds=embedded, use_cache=False)
        (slope,) = torch.autograd.grad(found[1].square().sum(), start)
    assert slope.abs() > 0


def test_a_model_without_such_layers_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = model_of("llama").config
    with pytest.raises(UserError, match="hidden states"), hooked(model, {"residual"}, lambda *_: None):  # type: ignore[arg-type]
        pass


def test_fused_projections_that_are_not_known_are_refused() -> None:
    model = model_of("llama")
    for layer in model.model.layers:
        layer.self_attn.query_key_value = layer.self_attn.q_proj
        del layer.self_attn.q_proj
    with pytest.raises(UserError, match="queries cannot be read"), hooked(model, {"pre_rope_queries"}, lambda *_: None):
        pass
    assert hooks(model) == 0


# Hooks of caches in pages, which live as long as their cache.


class Recorder(DMS):
    """DMS that marks every token, and lists the layers and activations that it reads."""

    def __init__(self, name: Activation, window: int = 4) -> None:
        super().__init__(Settings(window=window, gate="borrowed" if name == "pre_rope_queries" else "separate"))
        self.name = name
        self.reads: list[tuple[int, int]] = []

    @property
    def hooks(self) -> frozenset[Activation]:
        return frozenset({self.name})

    def allot(self, share: float, length: int) -> float:
        return 0.0

    def read(self, layer: int, name: Activation, tensor: torch.Tensor) -> torch.Tensor:
        assert name == self.name
        self.reads.append((layer, tensor.shape[1]))
        return torch.ones((tensor.shape[0], 2, tensor.shape[1]))


ACTIVATION_NAMES = sorted(ACTIVATIONS)


def answer(model: Any, cache: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
    return logits


@pytest.mark.parametrize("name", ACTIVATION_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_without_its_cache_do_not_reach_a_policy(family: str, name: Activation) -> None:
    model = model_of(family)
    plain = forward(model)
    policy, other = Recorder(name), new_cache(model, StreamingLLM(), 6)
    cache = new_cache(model, policy, "50%")
    assert torch.equal(forward(model), plain)
    answer(model, other)
    assert policy.reads == []
    answer(model, cache)
    assert policy.reads == [(0, 6), (1, 6)]
    for _ in range(2):  # after a pass of its own, too
        assert torch.equal(forward(model), plain)
        answer(model, other, TOKENS[:, :1])
        attention_of_layer = model.model.layers[0].self_attn
        queries = getattr(attention_of_layer, "q_proj", None) or attention_of_layer.qkv_proj
        queries(torch.ones((1, 3, 64), dtype=torch.float64))
    assert policy.reads == [(0, 6), (1, 6)]
    answer(model, cache, TOKENS[:, :1])
    assert policy.reads == [(0, 6), (1, 6), (0, 1), (1, 1)]


@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_two_caches_of_one_model_each_read_their_own_passes(name: Activation) -> None:
    model = model_of("qwen3")
    windows, prompts = (2, 7), (TOKENS, TOKENS.flip(1)[:, :5])

    def steps(cache: Any, prompt: torch.Tensor) -> Iterator[torch.Tensor]:
        yield answer(model, cache, prompt)
        for at in range(5):
            yield answer(model, cache, TOKENS[:, at : at + 1])

    alone = []
    for window, prompt in zip(windows, prompts, strict=True):
        cache = new_cache(model, Recorder(name, window), "50%")
        alone.append(list(steps(cache, prompt)))
        del cache
    policies = [Recorder(name, window) for window in windows]
    caches = [new_cache(model, policy, "50%") for policy in policies]
    # One step of each in turn.
    runs = [steps(cache, prompt) for cache, prompt in zip(caches, prompts, strict=True)]
    for wanted in zip(*alone, strict=True):
        for run, logits in zip(runs, wanted, strict=True):
            torch.testing.assert_close(next(run), logits, atol=1e-12, rtol=0)
    for policy, prompt in zip(policies, prompts, strict=True):
        assert policy.reads == [(layer, prompt.shape[1]) for layer in (0, 1)] + [(0, 1), (1, 1)] * 5


@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_hooks_are_gone_as_soon_as_their_cache_is(name: Activation) -> None:
    model = model_of("llama")
    gc.disable()
    try:
        one, two = (new_cache(model, Recorder(name), "50%") for _ in range(2))
        per_cache = hooks(model) // 2
        assert per_cache == (4 if name == "pre_rope_queries" else 2)
        for cache in (one, two):
            answer(model, cache)
            answer(model, cache, TOKENS[:, :1])
        copied = deepcopy(one)
        assert hooks(model) == 3 * per_cache
        answer(model, copied, TOKENS[:, :1])
        del one, cache
        assert hooks(model) == 2 * per_cache
        two.reset()
        answer(model, two)
        assert hooks(model) == 2 * per_cache
        del two
        assert hooks(model) == per_cache
        del copied
        assert hooks(model) == 0
    finally:
        gc.enable()


def test_a_cache_that_is_refused_leaves_no_hook() -> None:
    model = model_of("llama")
    for layer in model.model.layers:
        layer.self_attn.query_key_value = layer.self_attn.q_proj
        del layer.self_attn.q_proj
    with pytest.raises(UserError, match="queries cannot be read"):
        new_cache(model, Recorder("pre_rope_queries"), "50%")
    assert hooks(model) == 0
