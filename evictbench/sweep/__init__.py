"""Many runs: a grid of cells on several workers."""
