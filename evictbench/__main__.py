"""`python -m evictbench` is the `evictbench` command."""

from evictbench.cli import main

main()
