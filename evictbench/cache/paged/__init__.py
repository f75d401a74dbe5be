"""A cache of pages: each head keeps as many entries as its policy lets it."""
