"""lm-eval both ways: its tasks in our runs, our model in its runs."""
