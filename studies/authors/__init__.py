"""Our policies beside the code of their authors, run at a pinned commit; the table of differences is `docs/authors.md`.

A script of a policy runs the authors' code in an environment of its own, on models and tensors that a seed makes, and
writes what it kept, its scores and its logits as numbers under tests/authors/data. The code is never a part of ours.
"""
