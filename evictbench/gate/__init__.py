"""Gates: runs held against published numbers and against earlier runs."""
