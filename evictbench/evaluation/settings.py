"""The options of a run, as they were given."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from evictbench.models import bundled
from evictbench.policy.declarations import Prefill

CHOICES = {
    "question": ("default", "seen", "unseen"),
    "prefill": get_args(Prefill),
    "chat": ("auto", "on", "off"),
    "thinking": ("auto", "on", "off"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
}
"""Options that take one word, and the words that each takes."""


@dataclass(frozen=True)
class RunSettings:
    """The options of `evictbench run`, as given. `command()` gives the command line back."""

    policy: str
    suite: str
    budget: str | None = None
    tasks: str | None = None
    context: int | None = None
    limit: int | None = None
    model: str = bundled.NAME
    weights: str | None = None
    question: str = "default"
    prefill: Prefill = "native"
    chunk: int = 512
    max_new_tokens: str = "auto"
    chat: str = "auto"
    chat_template: str | None = None
    protocol: str = "default"
    suite_version: str | None = None
    repeats: int | None = None
    at: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    thinking: str = "auto"
    system_prompt: str | None = None
    skip_overlong: bool = False
    batch_size: int = 8
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    data_dir: Path | None = None
    haystack: Path | None = None
    out: Path = Path("results/runs")
    trust_remote_code: bool = False
    recency: str | None = None

    def command(self, **changes: Any) -> str:
        """The command line that runs these settings with `changes` made to them. Defaults are left out."""
        changed = replace(self, **changes)
        words = ["evictbench", "run"]
        for field in fields(self):
            value = getattr(changed, field.name)
            option = "--" + field.name.replace("_", "-")
            if value is True:
                words.append(option)
            elif value != field.default:
                words += [option, shlex.quote(str(value))]
        return " ".join(words)
