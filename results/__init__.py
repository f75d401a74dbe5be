"""Published numbers, our own reference runs, and (ignored by git) the runs made here."""
