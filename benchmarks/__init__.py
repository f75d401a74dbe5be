"""Speed and memory, side by side with other software. `python -m benchmarks` runs them; timings are never tests."""
