"""A training of DistillCache that was stopped ends in the weights of one that was not, by either method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import SITE

from evictbench.models import policy_weights
from evictbench.train import loop
from evictbench.train.run import Outcome, train
from evictbench.train.settings import Settings

METHODS = {
    "reinforce": "method=reinforce,samples=3,horizon=4",
    # with one sample the moving average of returns is the whole baseline, and has to be taken up again
    "one sample": "method=reinforce,samples=1,horizon=4",
    "supervised": "method=supervised,target=set,horizon=4,every=4",
}


class Silent:
    """Watches and keeps the lines of the log."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def phase(self, text: str) -> None: ...

    def planned(self, plan: Any) -> None: ...

    def collected(self, done: int, total: int) -> None: ...

    def step(self, line: Any, steps: int) -> None:
        self.lines.append(dict(line))


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("EVICTBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(SITE))
    from fake_plugins import make_model

    model: Path = make_model(tmp_path / "tiny", initializer_range=0.3)
    texts = tmp_path / "texts.jsonl"
    words = [" ".join(f"word{(i * 7 + j) % 13}." for j in range(100 + i)) for i in range(8)]
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))

    def call(out: str, method: str) -> tuple[Outcome, list[dict[str, Any]]]:
        watch = Silent()
        settings = Settings(
            policy="distillcache",
            data=(str(texts),),
            out=tmp_path / out,
            model=str(model),
            steps=5,
            budget="40,60",
            length=140,
            window=4,
            held_out=2,
            recipe=METHODS[method],
            save_every=2,
            device="cpu",
        )
        return train(settings, watch), watch.lines

    return call


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_training_goes_on_to_the_same_weights(
    trained: Any, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = trained("whole", method)
    plain = loop.Trainer._step

    def stop(self: Any, step: int, optimisers: Any) -> Any:
        if step == 3:
            raise OSError("the machine went away")
        return plain(self, step, optimisers)

    monkeypatch.setattr(loop.Trainer, "_step", stop)
    with pytest.raises(OSError, match="went away"):
        trained("broken", method)
    monkeypatch.setattr(loop.Trainer, "_step", plain)
    stopped = torch.load(tmp_path / "broken" / "checkpoint-2" / "learner.pt", weights_only=True)["learner"]
    broken, lines = trained("broken", method)
    assert [line["step"] for line in lines] == [3, 4, 5]
    first, second = (policy_weights.load(str(outcome.folder)).tensors for outcome in (whole, broken))
    assert all(torch.equal(first[name], second[name]) for name in first)
    learnt = [name for name in first if name.endswith("weight")]
    assert not any(torch.equal(first[name], stopped[f"ranker.{name}"]) for name in learnt)
    assert "residual" not in stopped or stopped["residual"].any()
