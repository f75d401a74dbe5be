"""The card of trained weights as Markdown, written from its data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def markdown(data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """README.md of a folder of weights: what they are, how they were made, what they reached, how to use them.

    data: the content of config.json; headings whose data is absent are left out. tensors: the weights, by name.
    """
    base, training = data["base_model"], data.get("training", {})
    variant = f", variant `{data['variant']}`" if data["variant"] else ""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    shape = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in base["shape"].items())
    lines = [
        "---",
        "library_name: evictbench",
        f"base_model: {base['name']}",
        "---",
        f"# {data['policy']}{' ' * bool(data['variant'])}{data['variant']} for {base['name']}",
        "",
        f"Trained weights of the KV-cache eviction policy `{data['policy']}`{variant}: "
        f"{sum(tensor.numel() for tensor in tensors.values()):,} numbers, {size:,} bytes."
        if tensors
        else f"A model trained to live with the KV-cache eviction policy `{data['policy']}`, which has no weights.",
        f"Base model: `{base['name']}` ({shape}; {base['sha256']}). "
        + (
            "No tensor's shape depends on the model: they load on any, and results then name this one."
            if data.get("transferable")
            else "They load on models of this shape only."
        ),
        "",
        f"    evictbench run --policy {_policy_argument(data)} {'--weights FOLDER ' if tensors else ''}--model MODEL "
        "--budget 256 --suite SUITE",
    ]
    if finetuned := data.get("finetuned"):
        lines += [
            "",
            "The model was trained too: it lies in `model/` beside this card "
            f"({finetuned['sha256']}), and MODEL is that folder. "
            f"Retention is to be measured against the full cache of the original, `{base['name']}`.",
        ]
    for heading, content in (
        ("Training", training),
        ("Settings", data.get("settings")),
        ("Calibration", data.get("calibration")),
    ):
        if content:
            lines += ["", f"## {heading}", "", *_items(content)]
    if notes := data.get("notes"):
        lines += ["", "## Limits and notes", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _policy_argument(data: Mapping[str, Any]) -> str:
    """The policy and its changed settings, as `--policy` takes them."""
    settings = ",".join(f"{name}={value}" for name, value in data.get("changed_settings", {}).items())
    return f"{data['policy']}:{settings}" if settings else str(data["policy"])


def _items(content: Mapping[str, Any]) -> list[str]:
    return [f"- {name.replace('_', ' ')}: {_text(value)}" for name, value in content.items() if value not in (None, {})]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping) and all(isinstance(inner, (int, float, str)) for inner in value.values()):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items())
    return value if isinstance(value, str) else json.dumps(value)
