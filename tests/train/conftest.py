"""A tiny model, texts, and trainings by the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_plugin_fixtures import SITE, environment, installed
from toy_policies import TOY
from trainings import TrainingWatcher, write_texts

from evictbench.train.run import train
from evictbench.train.settings import TrainSettings

__all__ = ["environment", "installed"]

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("EVICTBENCH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A model folder: 2 layers, 4 heads over 2 KV heads of 8."""
    from fake_plugins import make_model

    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl")


@pytest.fixture
def trained(tiny, texts, tmp_path):
    """Train in this process; the outcome, and the watcher."""

    def call(**given):
        watch = TrainingWatcher()
        settings = TrainSettings(
            **{
                "policy": TOY,
                "data": (str(texts),),
                "out": tmp_path / "out",
                "model": str(tiny),
                "steps": 6,
                "budget": "16,24",
                "window": 4,
                "length": 48,
                "save_every": 2,
                "device": "cpu",
            }
            | given
        )
        return train(settings, watch), watch

    return call


@pytest.fixture
def command(tiny, texts):
    """The command line of a training."""

    def words(out, *more):
        return [
            *(sys.executable, "-m", "evictbench", "train", "--policy", TOY, "--data", texts, "--out", out),
            *("--model", tiny, "--steps", 400, "--budget", "16,24", "--window", 4, "--length", 48),
            *("--save-every", 20, "--device", "cpu", *more),
        ]

    return words


@pytest.fixture
def start(environment, tmp_path):
    """Start a subprocess."""

    def call(words):
        path = os.pathsep.join([environment["PYTHONPATH"], str(SITE), str(HERE)])
        return subprocess.Popen(
            list(map(str, words)),
            env=environment | {"PYTHONPATH": path},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return call
