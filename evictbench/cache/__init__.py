"""The engine: KV caches from which policies evict."""
