"""Running a model through a cache: prompts one by one, decoding together."""
