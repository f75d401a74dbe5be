"""Model families: the page about them, a few of them really built and checked, and the sentences of the others."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

from evictbench.cache import attention, rope
from evictbench.errors import UserError
from evictbench.models.supported import check_supported
from studies import family_checks
from studies.families import DOCUMENT, families
from studies.family_sizes import LAYERS, small_config

pytestmark = pytest.mark.engine

FULL = {"layer_types": ["full_attention"] * LAYERS}


def test_the_page_is_about_the_families_of_the_installed_transformers() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    (version,) = re.findall(r"with transformers (\S+)\. It knows", page)
    rows = re.findall(r"^\| (\S+) \| (\w+) \|", page, re.MULTILINE)
    assert len(rows) > 150
    assert len({name for name, _ in rows}) == len(rows)
    if version == transformers.__version__:
        assert dict(rows) == families()


@pytest.mark.parametrize(
    "family",
    ["phi", "smollm3", "glm"],
    ids=["a part of each head rotates", "a layer does not rotate", "neighbours are paired"],
)
def test_sinks_are_moved_as_the_model_itself_moves_them(family: str) -> None:
    check_supported(small_config(family))
    assert family_checks.streaming(family_checks.build(family), "reindexed") < family_checks.TOLERANCE


def test_each_layer_says_whether_it_rotates() -> None:
    found = rope.rotations(family_checks.build("smollm3"), "streaming_llm")
    assert [rotation is not None for rotation in found] == [True, True, True, False]
    with pytest.raises(UserError, match="layer 3 of SmolLM3ForCausalLM rotates none"):
        rope.inverse_frequencies(family_checks.build("smollm3"), "kvpop")


def test_the_check_of_a_family_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_checks.build("smollm3")
    found = rope.rotations(model, "streaming_llm")
    monkeypatch.setitem(rope._of_model, model, [found[0]] * len(found))
    with pytest.raises(family_checks.Failed, match="logits differ"):
        family_checks.streaming(model, "reindexed")


def test_other_checks_of_one_family() -> None:
    model = family_checks.build("gpt2")
    assert family_checks.sinks_and_window(model) == "streaming_llm:positions=original"
    for check in ("full", "padded", "h2o"):
        assert family_checks.CHECKS[check](model) < 1e-9
    with pytest.raises(UserError, match="the keys of layer 0 of GPT2LMHeadModel depend on their position in another"):
        family_checks.streaming(model, "reindexed")


@pytest.mark.parametrize(
    ("family", "settings", "sentence"),
    [
        ("jetmoe", {}, "a mixture of attention heads, which repeats the keys after they are cached"),
        ("hrm_text", {}, "its layers 0 and 4 are one and the same, read twice"),
        ("gpt_oss", FULL, ""),
        ("gemma2", FULL, ""),
        ("deepseek_v3", {}, ""),
        ("bert-generation", {"is_decoder": False}, "it is an encoder"),
        ("granite", {"head_dim": 16}, ""),
    ],
)
def test_what_cannot_be_done_exactly_is_refused_before_weights(
    family: str, settings: dict[str, Any], sentence: str
) -> None:
    config = small_config(family, **settings)
    if not sentence:
        check_supported(config)
        return
    with pytest.raises(UserError) as refused:
        check_supported(config)
    assert sentence in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("arguments", "length", "refused"),
    [
        ({"shift": 50.0}, 4, "its layer 3 (Module) attends with shift=50.0"),
        ({"bias": torch.ones(2)}, 4, "attends with `bias`"),
        ({"softcap": 50.0, "s_aux": torch.ones(2)}, 4, None),
        ({"dropout": 0.1}, 4, "attends with dropout=0.1"),
        ({"sliding_window": 8}, 9, "attends with sliding_window=8"),
        ({"is_causal": False, "softcap": None, "dropout": 0.0, "sliding_window": 8, "use_cache": True}, 8, None),
        ({"position_ids": torch.zeros(1, 4), "output_attentions": False}, 4, None),
    ],
)
def test_an_argument_to_attention_that_is_not_known(
    arguments: dict[str, Any], length: int, refused: str | None
) -> None:
    module = torch.nn.Module()
    module.layer_idx = 3  # type: ignore[assignment]
    if refused is None:
        attention.refuse_unknown(module, arguments, length)
    else:
        with pytest.raises(attention.Unsupported, match=re.escape(refused)):
            attention.refuse_unknown(module, arguments, length)
