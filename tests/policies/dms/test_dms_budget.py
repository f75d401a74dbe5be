"""What a budget of DMS comes to, where its settings come from, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.models.policy_weights import Weights
from evictbench.policies.dms import DMS, Settings
from evictbench.policies.dms.allotment import OFF, Calibration
from evictbench.policy import ModelShape
from evictbench.policy.budget import Budget
from twin.tiny import random_tokens, tiny_model

TABLE = {"thresholds": [8.0, 2.0, -4.0], "beyond": [0.9, 0.5, 0.1], "length": 1024}
SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=16)


def weights(**card: Any) -> Weights:
    tensors = {"weight": torch.zeros(2, 2, 48), "bias": torch.zeros(2, 2)}
    return Weights(tensors, {"window": 32, "sinks": 4, "calibration": TABLE, **card}, "a test", "0")


def trained(config: Settings | None = None, **card: Any) -> DMS:
    policy = DMS(config)
    policy.use(weights(**card), SHAPE)
    return policy


def checkpoint(**config: Any) -> Any:
    base = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    text = SimpleNamespace(**base, **config)
    return SimpleNamespace(get_text_config=lambda decoder: text)


@pytest.mark.parametrize(("beyond", "threshold"), [(0.9, 8.0), (0.7, 5.0), (0.5, 2.0), (0.2, -2.5), (0.1, -4.0)])
@pytest.mark.parametrize("length", [200, 1000, 16_384])
def test_a_share_is_what_is_protected_and_a_share_of_the_rest(beyond: float, threshold: float, length: int) -> None:
    kept = 37 + beyond * (length - 37)
    assert trained().allot(kept / length, length) == pytest.approx(threshold)


def test_looser_than_the_table_is_its_loosest_and_all_is_off() -> None:
    assert trained().allot(0.99, 1000) == 8.0
    assert trained().allot(1.0, 1000) == OFF
    assert trained().allot(0.5, 30) == 8.0, "a text within sinks and window loses nothing at any threshold"


def test_tighter_than_the_table_is_refused() -> None:
    with pytest.raises(UserError, match=r"5.0% of 1000 tokens is less than dms keeps .* 13.3% in all"):
        trained().allot(0.05, 1000)


def test_entries_are_a_share_of_the_stated_length_or_of_the_prompt() -> None:
    policy = trained()
    assert policy.threshold(Budget(tokens=500), 1000) == policy.allot(0.5, 1000)
    assert policy.threshold(Budget(tokens=1000), 1000) == OFF
    assert policy.threshold(None, 1000) == OFF
    policy.stated_length = 2000
    assert policy.threshold(Budget(tokens=1000), 100) == policy.allot(0.5, 2000)
    assert policy.threshold(Budget(share=0.5), 100) == policy.allot(0.5, 2000)
    assert policy.threshold(Budget(tokens=1500), 3000) == policy.allot(0.5, 3000)


def test_the_card_says_what_no_setting_does() -> None:
    assert (trained().reach, trained().sinks) == (32, 4)
    set_otherwise = trained(Settings(window=7, sinks=0))
    assert (set_otherwise.reach, set_otherwise.sinks) == (7, 0)
    nested = DMS()
    nested.use(Weights(weights().tensors, {"settings": {"window": 9}}, "a test", "0"), SHAPE)
    assert (nested.reach, nested.sinks) == (9, 0)


def test_without_a_calibration_only_everything_can_be_had() -> None:
    policy = trained(calibration=None)
    assert policy.allot(1.0, 1000) == OFF
    with pytest.raises(UserError, match="no calibration"):
        policy.allot(0.5, 1000)


def test_a_checkpoint_brings_its_gate_window_and_share() -> None:
    policy = DMS()
    assert policy.learned
    policy.fit(checkpoint(dms_window_size=512, dms_cr=8))
    assert not policy.learned
    assert policy.borrowed
    assert policy.reach == 512
    assert policy.sinks == 0
    assert policy.hooks == {"pre_rope_queries"}
    assert policy.allot(0.125, 20_000) == 0.0
    with pytest.raises(UserError, match=r"trained to keep 12.5% of a text"):
        policy.allot(0.25, 20_000)
    separate = DMS()
    separate.fit(checkpoint(dms_window_size=512, dms_separate_alpha=True))
    assert separate.learned
    assert separate.hooks == {"residual"}
    assert not DMS(Settings(window=4)).fit(checkpoint())
    shared = DMS(Settings(alpha_per="layer"))
    shared.fit(checkpoint(dms_window_size=16, dms_cr=4))
    queries = torch.randn(1, 5, 4, 16)
    z = shared.read(0, "pre_rope_queries", queries)
    torch.testing.assert_close(z, (100 * queries[:, :, :1, -1] - 5).transpose(1, 2).expand(1, 2, 5))


def test_a_checkpoint_brings_the_scale_and_offset_of_its_logits() -> None:
    policy = DMS()
    policy.fit(checkpoint(dms_window_size=16, dms_cr=4, dms_alpha_scale=50.0, dms_initial_alpha_offset=2.0))
    queries = torch.randn(1, 5, 4, 16)
    z = policy.read(0, "pre_rope_queries", queries)
    torch.testing.assert_close(z, (50 * queries[:, :, ::2, -1] - 2).transpose(1, 2))


def test_one_decision_for_a_layer() -> None:
    tensors = {"weight": torch.randn(2, 2, 48), "bias": torch.randn(2, 2)}
    hidden = torch.randn(1, 6, 48)
    by_head, by_layer = DMS(), DMS(Settings(alpha_per="layer"))
    for policy in (by_head, by_layer):
        policy.use(Weights(tensors, weights().card, "a test", "0"), SHAPE)
    heads, layer = by_head.read(1, "residual", hidden), by_layer.read(1, "residual", hidden)
    assert not torch.equal(heads[:, 0], heads[:, 1])
    assert torch.equal(layer, heads[:, :1].expand_as(heads))


def test_bad_settings_and_weights_are_refused() -> None:
    with pytest.raises(UserError, match="window must be 1 or more"):
        Settings(window=0)
    with pytest.raises(UserError, match="sinks must be 0 or more"):
        Settings(sinks=-1)
    with pytest.raises(UserError, match="not a gate of 2 layers with 3 KV heads"):
        DMS().use(weights(), ModelShape(layers=2, heads=6, kv_heads=3, head_dim=16))
    with pytest.raises(UserError, match="read hidden states of width"):
        DMS().use(weights(), ModelShape(layers=2, heads=4, kv_heads=2, head_dim=16, hidden_size=7))
    for name, tensor in (("weight", torch.ones(2, 2)), ("more", torch.ones(2))):
        damaged = Weights({**weights().tensors, name: tensor}, weights().card, "a test", "0")
        with pytest.raises(UserError, match=r"not a gate of 2 layers|hold more, which a gate has no place for"):
            DMS().use(damaged, SHAPE)
    with pytest.raises(UserError, match="no thresholds"):
        trained(calibration={"thresholds": [1.0], "beyond": []})
    with pytest.raises(UserError, match="has no window"):
        _ = DMS(Settings(gate="borrowed")).reach


def test_a_table_that_is_not_rising_keeps_its_rising_part() -> None:
    table = Calibration.of({"thresholds": [3.0, 2.0, 1.0], "beyond": [0.6, 0.6, 0.2]})
    assert table.beyond == (0.2, 0.6)
    assert table.thresholds == (1.0, 2.0)


def test_a_part_of_the_model_that_no_hook_reads_is_not_run() -> None:
    model: Any = tiny_model("llama")
    policy = DMS()
    policy.use(weights(), ModelShape.of(model.config))
    cache = new_cache(model, policy, "100%")
    hidden = model.model.embed_tokens(torch.tensor([random_tokens(4)]))
    rotation = model.model.rotary_emb(hidden, position_ids=torch.arange(4)[None])
    with pytest.raises(RuntimeError, match="reads residual, which this model did not pass on"):
        model.model.layers[0].self_attn(
            hidden_states=hidden, position_embeddings=rotation, attention_mask=None, past_key_values=cache
        )
