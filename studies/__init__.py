"""Questions asked of the policies here, with their answers in results/reference; each is run by `python -m`."""
