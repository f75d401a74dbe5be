"""One self-contained HTML page about a folder of results."""
