"""One benchmark suite a folder; found by the engine through the entry-point group `evictbench.suites`."""
