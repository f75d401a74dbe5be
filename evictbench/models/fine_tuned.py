"""Which model a fine-tuned one was made from: written into its config by the training, read by whoever runs it.

The record lies in config.json, so it goes where the model goes and is a part of its hash. Retention of a fine-tuned
model is over the full cache of that base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evictbench.errors import UserError
from evictbench.store.records import BaseModel, checked

FIELD = "evictbench_base"
"""The field of config.json. A model that was fine-tuned elsewhere may be given it by hand."""


def record_base(config: Any, name: str, sha256: str, policy: str) -> None:
    """Write into a model's config what it was fine-tuned from.

    name, sha256: of the model that the training began with, and its `load.weights_hash`; where that was fine-tuned
    itself, its own base stands. policy: the label of the policy that it was trained under.
    """
    before = getattr(config, FIELD, None)
    base = before if isinstance(before, Mapping) else {"name": name, "sha256": sha256}
    setattr(config, FIELD, {"name": base["name"], "sha256": base.get("sha256"), "policy": policy})


def base_of(config: Any, model: str) -> dict[str, Any] | None:
    """What a model was fine-tuned from, as a run's identity has it; None for a model that names no base.

    model: its name, for the sentence. Raises UserError for a record that is none.
    """
    found = getattr(config, FIELD, None)
    if found is None:
        return None
    try:
        base: BaseModel = checked(found, BaseModel)
    except ValueError as error:
        raise UserError(f"The config of {model} names no base model that can be read ({FIELD}: {error}).") from None
    return {"name": base.name, "sha256": base.sha256, "policy": base.policy}
