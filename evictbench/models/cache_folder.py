"""The folder of what evictbench can make again: the converted model, and hashes of large files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$EVICTBENCH_CACHE, or a folder in the user's cache folder; there or not."""
    folder = os.environ.get("EVICTBENCH_CACHE")
    if folder:
        return Path(folder).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("evictbench", appauthor=False)
