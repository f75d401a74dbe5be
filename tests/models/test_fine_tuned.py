"""What a fine-tuned model's config says of its base, and how a run takes it."""

from types import SimpleNamespace

import pytest

from evictbench.errors import UserError
from evictbench.models.fine_tuned import FIELD, base_of, record_base


def test_a_base_is_written_and_read_back():
    config = SimpleNamespace()
    assert base_of(config, "model") is None
    record_base(config, "org/base", "sha256:1", "kvpop:label=max")
    assert base_of(config, "model") == {"name": "org/base", "sha256": "sha256:1", "policy": "kvpop:label=max"}


def test_what_a_fine_tuned_model_is_trained_into_has_its_own_base():
    config = SimpleNamespace()
    record_base(config, "org/base", "sha256:1", "streaming_llm")
    record_base(config, "model", "sha256:2", "kvpop")
    assert base_of(config, "model") == {"name": "org/base", "sha256": "sha256:1", "policy": "kvpop"}


def test_a_base_that_is_written_by_hand_may_be_a_name_alone():
    assert base_of(SimpleNamespace(**{FIELD: {"name": "org/base"}}), "model") == {
        "name": "org/base",
        "sha256": None,
        "policy": None,
    }


@pytest.mark.parametrize("wrong", ["org/base", {}, {"name": ""}, {"name": 3}, {"name": "a", "sha256": 4}, []])
def test_a_record_that_is_none_is_a_sentence(wrong):
    with pytest.raises(UserError, match=r"The config of tuned names no base model .*\(evictbench_base: "):
        base_of(SimpleNamespace(**{FIELD: wrong}), "tuned")
