"""The engine: KV caches from which policies evict."""

from typing import Any

__all__ = ["EvictionCache", "KVCache", "new_cache"]

_HOMES = {
    "EvictionCache": "evictbench",
    "KVCache": "evictbench.cache.base",
    "new_cache": "evictbench.cache.new_cache",
}


def __getattr__(name: str) -> Any:
    """The names above, imported when they are asked for: they load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
