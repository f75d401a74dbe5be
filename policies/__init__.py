"""One eviction policy a file; found by the engine through the entry-point group `evictbench.policies`."""
