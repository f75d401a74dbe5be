"""Lets these tests find the fake suite, policy, model and generator."""

from fakes import environment, installed

__all__ = ["environment", "installed"]
