"""Lets these tests find the fake suite, policy, model and generator."""

from fake_plugin_fixtures import environment, installed

__all__ = ["environment", "installed"]
