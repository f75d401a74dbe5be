"""Text inside Markdown."""

from __future__ import annotations

import re


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is, inside a table too."""
    return re.sub(r"[\\`*|<>\[\]]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))
