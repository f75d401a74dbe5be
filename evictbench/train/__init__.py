"""Training of learned policies."""
