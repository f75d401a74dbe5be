"""One run of a policy on a suite, from its settings to its summary."""
