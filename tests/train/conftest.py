"""A tiny model, texts, and trainings by the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import SITE, environment, installed
from toy import TOY

from evictbench.train.run import train
from evictbench.train.settings import Settings

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
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    records = [{"text": " ".join(f"word{(i * 7 + j) % 13}." for j in range(20 + i))} for i in range(24)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


class Silent:
    """Watches and keeps what it hears."""

    def __init__(self):
        self.phases, self.lines, self.collections = [], [], []

    def phase(self, text):
        self.phases.append(text)

    def planned(self, plan):
        self.plan = plan

    def collected(self, done, total):
        self.collections.append((done, total))

    def step(self, line, steps):
        self.lines.append(line)


@pytest.fixture
def trained(tiny, texts, tmp_path):
    """Trains here; gives the folder's outcome and what the watcher heard."""

    def call(**given):
        watch = Silent()
        settings = Settings(
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
    """The words of a training on the command line."""

    def words(out, *more):
        return [
            *(sys.executable, "-m", "evictbench", "train", "--policy", TOY, "--data", texts, "--out", out),
            *("--model", tiny, "--steps", 400, "--budget", "16,24", "--window", 4, "--length", 48),
            *("--save-every", 20, "--device", "cpu", *more),
        ]

    return words


@pytest.fixture
def start(environment, tmp_path):
    """Starts a subprocess."""

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
