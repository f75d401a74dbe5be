"""`python -m evictbench` is the `evictbench` command."""

from evictbench.cli.app import main

main()
