"""How the weights that come with evictbench are made: their texts, and one command a set (`make train-bundled`)."""
