"""`evictbench.EvictionCache` as people use it: any policy, transformers' own generate, copies, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, pipeline

import evictbench.cache
from evictbench import EvictionCache
from evictbench.cache.base import KVCache
from evictbench.cache.probe import cache_argument
from evictbench.errors import UserError
from evictbench.policies.h2o import H2O
from evictbench.policy import HeadBudgetPolicy, RaggedPolicy
from twin import tiny_model
from twin.tiny import random_tokens

BUNDLED = ["dms", "distillcache", "indexmem_pp", "kvpop", "kvpop_mlp", "kvpop_mlp:label=max"]
TRAINING_FREE = ["h2o", "random:recent=4", "snapkv:window=4,kernel=3,decode=reselect", "streaming_llm", "tova"]

FILE = '''
from evictbench.policy import Policy

class Newest(Policy):
    """Keeps the newest entries."""
    name, summary, paper = "newest", "keeps the newest entries", "-"

    def score(self, step):
        return step.positions.float()
'''


def generate(model: Any, cache: Any, tokens: list[int], **options: Any) -> list[int]:
    """The greedy continuation by transformers' generate."""
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    output = model.generate(torch.tensor([tokens]), **{cache_argument(model): cache}, **options)
    return [int(token) for token in output[0, len(tokens) :]]


@pytest.mark.parametrize("policy", TRAINING_FREE)
def test_a_policy_by_name(policy: str) -> None:
    model = tiny_model()
    cache = EvictionCache(model, policy, budget=16)
    assert len(generate(model, cache, random_tokens(40))) == 8
    assert cache.rows[0].occupancy.largest == 16


@pytest.mark.parametrize("policy", BUNDLED)
def test_a_learned_policy_brings_its_weights(policy: str, smollm2: Any) -> None:
    before = smollm2.model.config._attn_implementation
    try:
        cache = EvictionCache(smollm2.model, policy, budget="50%")
        tokens = smollm2.tokenizer("One two three four five six seven. " * 40).input_ids
        assert len(generate(smollm2.model, cache, tokens, max_new_tokens=3)) == 3
        assert cache.kept(5).shape[-1] < len(tokens)
    finally:
        smollm2.model.set_attn_implementation(before)


def test_a_policy_from_a_file_and_an_object(tmp_path: Path) -> None:
    model, tokens = tiny_model(), random_tokens(40)
    (tmp_path / "newest.py").write_text(FILE)
    cache = EvictionCache(model, f"{tmp_path / 'newest.py'}:Newest", budget=10)
    generate(model, cache, tokens)
    assert cache.kept(0)[0].tolist() == list(range(38, 47))
    by_object = EvictionCache(model, H2O(H2O.Config(group="max")), budget=16)
    by_name = EvictionCache(model, "h2o:group=max", budget=16)
    assert generate(model, by_object, tokens) == generate(model, by_name, tokens)


def test_it_is_found_where_it_used_to_be() -> None:
    assert evictbench.cache.EvictionCache is EvictionCache
    assert issubclass(evictbench.cache.KVCache, KVCache)


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", "snapkv:window=4,kernel=3", "tova", "random:recent=4"])
def test_a_copy_answers_another_question(policy: str) -> None:
    """A copy of a cache that has read a context gives what a new cache gives, and leaves the first one as it was."""
    model, context = tiny_model(), random_tokens(40)
    questions = [random_tokens(length, seed) for length, seed in ((3, 1), (5, 2), (3, 1))]

    def read() -> KVCache:
        cache = EvictionCache(model, policy, budget=16, prompt_length=len(context))
        with torch.no_grad():
            model(torch.tensor([context]), **{cache_argument(model): cache})
        return cache

    compressed = read()
    kept = [compressed.kept(layer).tolist() for layer in range(2)]
    for question in questions:
        cache = copy.deepcopy(compressed)
        assert generate(model, cache, context + question) == generate(model, read(), context + question)
        assert cache.nbytes() == cache.bytes_held
    assert [compressed.kept(layer).tolist() for layer in range(2)] == kept
    assert compressed.get_seq_length() == len(context)
    assert copy.deepcopy(compressed).model is model


def test_the_same_cache_for_a_second_text_is_a_sentence() -> None:
    model = tiny_model()
    cache = EvictionCache(model, "h2o", budget=16)
    generate(model, cache, random_tokens(40))
    with pytest.raises(UserError, match="has seen 47 tokens, and was given a text that does not go on from there"):
        generate(model, cache, random_tokens(30, 1))


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm"])
@pytest.mark.parametrize("second", [3, 7, 8, 12, 13], ids=lambda length: f"{length} tokens")
def test_a_second_text_without_a_mask_is_a_sentence(policy: str, second: int) -> None:
    """`generate` cuts what the cache has seen off the text, and hands the rest on without a mask."""
    model, tokens = tiny_model(), random_tokens(12)
    cache = EvictionCache(model, policy, budget=16)
    answer = generate(model, cache, tokens, max_new_tokens=2)
    with pytest.raises(UserError, match="has seen 13 tokens, and was given a text that does not go on from there"):
        generate(model, cache, random_tokens(second, 1), max_new_tokens=3)
    both = generate(model, cache, [*tokens, *answer], max_new_tokens=3)  # what goes on from there still does
    assert both == generate(model, EvictionCache(model, policy, budget=16), tokens, max_new_tokens=5)[2:]


def test_a_padded_chunk_after_the_prompt_is_no_second_text() -> None:
    """Padding stands at position 0, wherever it is."""
    model, context = tiny_model(), torch.tensor([random_tokens(20), random_tokens(20, 1)])
    question, mask = torch.tensor([[0, 0, 3, 4], [5, 6, 7, 8]]), torch.ones(2, 24, dtype=torch.int64)
    mask[0, 20:22] = 0
    cache = EvictionCache(model, "h2o", budget=16, prompt_length=20)
    with torch.no_grad():
        model(context, **{cache_argument(model): cache})
    model.generate(
        torch.cat([context, question], 1), attention_mask=mask, max_new_tokens=2, **{cache_argument(model): cache}
    )
    assert cache.seen == [23, 25]


def test_another_number_of_rows_is_a_sentence() -> None:
    model = tiny_model()
    cache = EvictionCache(model, "h2o", budget=16)
    with torch.no_grad():
        model(torch.tensor([random_tokens(20)]), **{cache_argument(model): cache})
        with pytest.raises(UserError, match="holds 1 sequence and was given 2"):
            model(torch.tensor([[1], [2]]), **{cache_argument(model): cache})


def test_two_prompts_in_a_pipeline_are_a_sentence(smollm2: Any) -> None:
    before = smollm2.model.config._attn_implementation
    try:
        cache = EvictionCache(smollm2.model, "streaming_llm", budget=16)
        generator = pipeline("text-generation", model=smollm2.model, tokenizer=smollm2.tokenizer)
        with pytest.raises(UserError, match="serves one generation"):
            generator(
                ["The first prompt of two.", "The second."],
                max_new_tokens=4,
                do_sample=False,
                **{cache_argument(smollm2.model): cache},
            )
    finally:
        smollm2.model.set_attn_implementation(before)


def test_beams_and_assisted_decoding_are_sentences() -> None:
    model, tokens = tiny_model(), random_tokens(20)
    with pytest.raises(UserError, match="Beam search is not supported"):
        generate(model, EvictionCache(model, "h2o", budget=16), tokens, num_beams=2)
    with pytest.raises((UserError, ValueError), match=r"[Aa]ssisted decoding"):
        generate(model, EvictionCache(model, "h2o", budget=16), [1, 2, 3] * 7, prompt_lookup_num_tokens=3)


def test_a_cache_of_another_model_is_a_sentence() -> None:
    model, other = tiny_model(), tiny_model("qwen3")
    EvictionCache(other, "tova", budget=16)
    with pytest.raises(UserError, match="made for another model"):
        generate(other, EvictionCache(model, "h2o", budget=16), random_tokens(20))


def test_a_model_that_attends_otherwise_is_a_sentence() -> None:
    model = copy.deepcopy(tiny_model())
    cache = EvictionCache(model, "h2o", budget=16)
    model.set_attn_implementation("eager")
    with pytest.raises(UserError, match="does not attend through it"):
        generate(model, cache, random_tokens(20))


@pytest.mark.parametrize(
    ("policy", "options", "sentence"),
    [
        ("h3o", {"budget": 16}, "Unknown policy 'h3o'"),
        ("h2o", {}, "h2o needs a budget"),
        ("full", {"budget": 16}, "full takes no budget"),
        ("random", {}, "random needs a budget"),
        ("h2o", {"budget": 0}, "keeps nothing"),
        ("h2o", {"budget": 16, "prefill": "sparse"}, "Unknown prefill 'sparse'"),
        ("h2o", {"budget": 16, "prompt_length": 0}, "prompt_length is a whole number from 1 on, and not 0"),
        ("h2o", {"budget": 16, "rows": "2"}, "rows is a whole number from 1 on, and not '2'"),
        (H2O, {"budget": 16}, r"A policy is a name .* give H2O\(\)"),
        (None, {"budget": 16}, "A policy is a name"),
        ("streaming_llm", {"budget": 4}, "at least 5 entries"),
        ("h2o", {"budget": 16, "weights": "w"}, "is not learned and takes no weights"),
        ("kvpop", {"budget": 64}, "no weights for"),
        ("oracle", {"budget": 64}, "needs labels from a dense run"),
    ],
)
def test_what_cannot_be_is_a_sentence(policy: Any, options: dict[str, Any], sentence: str) -> None:
    model = tiny_model()
    with pytest.raises(UserError, match=sentence):
        generate(model, EvictionCache(model, policy, **options), random_tokens(20))


@pytest.mark.parametrize("model", [None, "smollm2"])
def test_what_is_no_model_is_a_sentence(model: Any) -> None:
    with pytest.raises(UserError, match=f"takes a transformers model first, and not {model!r}"):
        EvictionCache(model, "h2o", budget=16)


def test_a_model_that_is_not_supported_is_refused_and_left_as_it_was() -> None:
    config = CONFIG_MAPPING["mistral"](
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="none of its layers attends to the whole text"):
        EvictionCache(model, "h2o", budget=16)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("policy", "budget"), [("dms", "50%"), ("indexmem_pp", 128)])
def test_a_policy_with_hooks_evicts_and_leaves_the_model_as_it_was(policy: str, budget: Any, smollm2: Any) -> None:
    """DMS and IndexMem++ live in pages and hang hooks on the model."""
    model = smollm2.model
    tokens = smollm2.tokenizer("One two three four five six seven. " * 24).input_ids
    before = model.config._attn_implementation
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    model.set_attn_implementation("sdpa")
    plain = model(torch.tensor([tokens[:8]])).logits
    try:
        cache = EvictionCache(model, policy, budget)
        assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] != hooks
        assert torch.equal(model(torch.tensor([tokens[:8]])).logits, plain), "while the cache is alive"
        generate(model, cache, tokens, max_new_tokens=2)
        assert cache.entries_held()[1] < 0.9 * len(tokens)
        with pytest.raises(UserError, match="serves one generation"):
            generate(model, cache, tokens[:30], max_new_tokens=2)
        del cache
        assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] == hooks
        assert torch.equal(model(torch.tensor([tokens[:8]])).logits, plain)
    finally:
        model.set_attn_implementation(before)


def test_a_policy_of_the_old_interface_is_refused() -> None:
    with pytest.raises(TypeError, match="shares, which is now granularity"):
        type("Old", (H2O,), {"shares": "layer"})
    policy = H2O()
    policy.shares = "layer"
    with pytest.raises(TypeError, match="shares, which is now granularity"):
        EvictionCache(tiny_model(), policy, budget=16)


def test_a_padded_batch_in_chunks_of_one_token_is_a_sentence() -> None:
    model = tiny_model()
    cache = EvictionCache(model, "h2o", budget=16)
    tokens, mask = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1], [1, 1]])
    with pytest.raises(UserError, match="cannot be read in chunks of one token"):
        model.generate(
            tokens, attention_mask=mask, max_new_tokens=2, prefill_chunk_size=1, **{cache_argument(model): cache}
        )


@pytest.mark.parametrize(
    ("family", "old", "new"), [(RaggedPolicy, "taps", "hooks"), (HeadBudgetPolicy, "divide", "head_budgets")]
)
def test_old_names_of_paged_policies_are_refused(family: type[Any], old: str, new: str) -> None:
    with pytest.raises(TypeError, match=f"{old}, which is now {new}"):
        type("Old", (family,), {old: None})
