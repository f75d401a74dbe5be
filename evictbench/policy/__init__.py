"""The contract between the engine and an eviction method."""
