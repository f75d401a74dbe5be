"""Memory and latency of prefill and decode."""
