"""A training of DistillCache that was stopped ends in the weights of one that was not, by either method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugin_fixtures import SITE
from trainings import TrainingWatcher, break_off, write_texts

from evictbench.models import policy_weights
from evictbench.train.run import Outcome, train
from evictbench.train.settings import TrainSettings

METHODS = {
    "reinforce": "method=reinforce,samples=3,horizon=4",
    # with one sample the moving average of returns is the whole baseline, and has to be taken up again
    "one sample": "method=reinforce,samples=1,horizon=4",
    "supervised": "method=supervised,target=set,horizon=4,every=4",
}


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("EVICTBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(SITE))
    from fake_plugins import make_model

    model: Path = make_model(tmp_path / "tiny", initializer_range=0.3)
    texts = write_texts(tmp_path / "texts.jsonl", count=8, words=100)

    def call(out: str, method: str) -> tuple[Outcome, list[dict[str, Any]]]:
        watch = TrainingWatcher()
        settings = TrainSettings(
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
def test_a_stopped_training_goes_on_to_the_same_weights(trained: Any, method: str, tmp_path: Path) -> None:
    whole, _ = trained("whole", method)
    break_off(lambda: trained("broken", method), step=3)
    stopped = torch.load(tmp_path / "broken" / "checkpoint-2" / "learner.pt", weights_only=True)["learner"]
    broken, lines = trained("broken", method)
    assert [line["step"] for line in lines] == [3, 4, 5]
    first, second = (policy_weights.load(str(outcome.folder)).tensors for outcome in (whole, broken))
    assert all(torch.equal(first[name], second[name]) for name in first)
    learnt = [name for name in first if name.endswith("weight")]
    assert not any(torch.equal(first[name], stopped[f"ranker.{name}"]) for name in learnt)
    assert "residual" not in stopped or stopped["residual"].any()
