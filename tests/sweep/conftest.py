"""Lets these tests find the fake suite and policy, a tiny model with weights, and policies that fail."""

import pytest
from fake_plugin_fixtures import environment, installed

__all__ = ["environment", "installed"]

FAILING = """
from evictbench.policy import Policy


class Bursts(Policy):
    name, summary, paper = "bursts", "fails", "none"

    def score(self, step):
        raise RuntimeError("the score\\nis gone")


class Hungry(Policy):
    name, summary, paper = "hungry", "needs too much", "none"

    def score(self, step):
        import torch

        raise torch.OutOfMemoryError("no room for 3 GiB")
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from fake_plugins import make_model

    return str(make_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def failing(tmp_path):
    """A file of policies that fail."""
    file = tmp_path / "failing.py"
    file.write_text(FAILING)
    return file
