"""The files of results, traces and published numbers, and reading them; without torch."""
