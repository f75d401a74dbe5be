"""evictbench: what a KV-cache eviction policy costs in accuracy and saves in memory and time."""

__version__ = "0.1.0"
