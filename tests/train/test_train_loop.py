"""The loop: what learns, what does not, and what a stopped training comes to."""

import json
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from toy_policies import GATE, TOY

from evictbench.errors import RunFailed, UserError
from evictbench.models import load
from evictbench.models.fine_tuned import base_of
from evictbench.policy.learner import Learner
from evictbench.train import loop
from evictbench.train.optimizer import learning_rate
from evictbench.train.plan import BlockOrder


def tensors(outcome):
    return load_file(outcome.folder / "weights.safetensors")


def logged(outcome):
    lines = [json.loads(line) for line in (outcome.folder / "curves.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def trainers(monkeypatch):
    """Every Trainer that is made."""
    made = []
    plain = loop.Trainer.__init__

    def note(self, *arguments):
        plain(self, *arguments)
        made.append(self)

    monkeypatch.setattr(loop.Trainer, "__init__", note)
    return made


def test_a_stored_scorer_learns_and_the_folder_says_how(trained):
    outcome, watch = trained(steps=60, lr=0.05)
    lines = [json.loads(line) for line in (outcome.folder / "curves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert {"loss", "recall", "lr", "grad_norm", "budget", "tokens", "seconds"} <= lines[0].keys()
    assert {line["budget"] for line in lines} == {16, 24}
    assert watch.lines == lines
    files = {path.name for path in outcome.folder.iterdir()}
    assert files >= {"weights.safetensors", "config.json", "README.md", "curves.jsonl", "curves.png"}
    assert not [name for name in files if "checkpoint" in name or "unfinished" in name]
    card = json.loads((outcome.folder / "config.json").read_text())
    assert card["policy"], card["variant"] == ("toy", "mean")
    assert card["base_model"]["shape"] == {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden_size": 32}
    assert card["training"]["held_out"]["loss"] < lines[0]["loss"]
    assert card["training"]["held_out_blocks"] == 2
    assert (outcome.folder / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_the_statistics_come_from_the_texts(trained, trainers):
    trained()
    store, blocks = trainers[0]._store, trainers[0].plan.blocks
    looked_at = [store.read(blocks[index])["x"].double() for index in range(trainers[0].plan.train_blocks)]
    mean = torch.stack([x.mean(dim=(0, 3)) for x in looked_at]).mean(0).float()
    assert torch.allclose(trainers[0].learner.mean, mean, atol=1e-6)


@pytest.mark.parametrize("policy", [None, GATE])
def test_gradients_reach_the_scorer_and_nothing_else(trained, trainers, monkeypatch, policy):
    reached = []
    plain = loop.Optimisers.step

    def look(self, rate):
        trainer = trainers[-1]
        reached.append(all(parameter.grad is not None for parameter in trainer.learner.parameters()))
        if trainer.has_model:
            assert all(parameter.grad is None for parameter in trainer.model.parameters())
            assert not any(parameter.requires_grad for parameter in trainer.model.parameters())
        return plain(self, rate)

    monkeypatch.setattr(loop.Optimisers, "step", look)
    trained(**({} if policy is None else {"policy": policy}))
    assert reached == [True] * 6


def test_fine_tuning_keeps_two_losses_apart(trained, trainers, monkeypatch):
    """The divergence alone leaves the scorer without a gradient; the scorer's loss alone leaves the model without."""
    checked = []

    class Enough(Exception):
        pass

    def look(self, step, optimisers):
        batch = self.batch([0], 0, "test", 16)
        scorer, model = list(self.learner.parameters()), list(self.student.parameters())
        top = self.teacher(batch.tokens)
        following = loop.StudentAttention(self.learner.attention(batch))
        self.student(batch.tokens, *top, following).backward()
        assert all(parameter.grad is None for parameter in scorer)
        assert all(parameter.grad is not None for parameter in model)
        assert following.student.asked == [0, 1]  # checkpointed layers attend twice and are asked once
        for parameter in model:
            parameter.grad = None
        batch.features = following.features()
        self.learner.loss(batch).total.backward()
        assert all(parameter.grad is not None for parameter in scorer)
        assert all(parameter.grad is None for parameter in model)
        assert all(parameter.grad is None for parameter in self.model.parameters())
        checked.append(step)
        raise Enough

    monkeypatch.setattr(loop.Trainer, "_step", look)
    with pytest.raises(Enough):
        trained(finetune=True)
    assert checked == [0]


def test_fine_tuning_brings_the_model_nearer_and_saves_it(trained, tiny):
    outcome, watch = trained(finetune=True, steps=30, model_lr=2e-3, lr=0.02)
    assert watch.lines[-1]["kl"] < watch.lines[0]["kl"]
    assert {"kl", "score", "recall", "model_grad_norm"} <= watch.lines[0].keys()
    card = json.loads((outcome.folder / "config.json").read_text())
    tuned, base = load.resolve(str(outcome.folder / "model")), load.resolve(str(tiny))
    assert card["finetuned"]["sha256"] == load.weights_hash(tuned)
    assert card["base_model"]["sha256"] == load.weights_hash(base)
    new, old = (load.load_model(source, "cpu").state_dict() for source in (tuned, base))
    assert new.keys() == old.keys()
    assert not torch.equal(new["model.embed_tokens.weight"], old["model.embed_tokens.weight"])
    assert {tensor.dtype for tensor in new.values()} == {tensor.dtype for tensor in old.values()}
    named = {"name": "tiny", "sha256": load.weights_hash(base), "policy": "toy"}
    assert base_of(load.load_config(tuned), "model") == named
    assert base_of(load.load_config(base), "tiny") is None


def test_streaming_llm_is_trained_with_its_model_alone(trained):
    outcome, watch = trained(policy="streaming_llm", finetune=True, steps=20, model_lr=2e-3)
    assert watch.lines[-1]["kl"] < watch.lines[0]["kl"]
    assert (tensors(outcome), outcome.learned) == ({}, False)
    assert base_of(load.load_config(load.resolve(str(outcome.folder / "model"))), "model")["policy"] == "streaming_llm"
    assert "which has no weights" in (outcome.folder / "README.md").read_text()


def test_rows_and_passes_are_a_mean_over_the_same_blocks(trained, tmp_path):
    """Two rows at once and two passes of one row are one step, but for the noise of each pass."""
    together, _ = trained(batch_size=2, out=tmp_path / "rows", steps=1)
    apart, _ = trained(accumulate=2, out=tmp_path / "passes", steps=1)
    assert torch.allclose(tensors(together)["weight"], tensors(apart)["weight"], atol=1e-4)
    assert apart.record["training"]["blocks_per_step"] == together.record["training"]["blocks_per_step"] == 2


def test_features_are_collected_once_for_every_label_and_budget(trained, tmp_path, monkeypatch):
    _, watch = trained(store=tmp_path / "store")
    assert watch.collections[-1] == (8, 8)
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the store has everything"))
    second, watch = trained(policy=f"{TOY}:label=max", budget="20", store=tmp_path / "store", out=tmp_path / "max")
    assert watch.collections == []
    assert second.record["variant"] == "max"


def test_a_store_goes_on_at_the_block_where_it_was_stopped(trained, tmp_path):
    trained(store=tmp_path / "store")
    files = sorted((tmp_path / "store").rglob("*.safetensors"))
    times = {file: file.stat().st_mtime_ns for file in files}
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-100])
    _, watch = trained(store=tmp_path / "store", out=tmp_path / "again")
    assert watch.collections == [(7, 8), (8, 8)]
    assert {file: file.stat().st_mtime_ns for file in files[2:]} == {file: times[file] for file in files[2:]}


def test_a_finished_training_is_not_done_again(trained):
    first, _ = trained()
    stamp = (first.folder / "weights.safetensors").stat().st_mtime_ns
    again, watch = trained()
    assert (again.before, watch.lines) == (True, [])
    assert (first.folder / "weights.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="differs in lr"):
        trained(lr=0.5)


@pytest.mark.parametrize("mode", [{}, {"finetune": True}, {"policy": GATE}])
def test_a_failed_training_goes_on_to_the_same_weights(trained, tmp_path, monkeypatch, mode):
    whole, _ = trained(out=tmp_path / "whole", steps=7, **mode)
    plain, calls = loop.Trainer._step, []

    def stop(self, step, optimisers):
        calls.append(step)
        if step == 5:
            raise OSError("the machine went away")
        return plain(self, step, optimisers)

    monkeypatch.setattr(loop.Trainer, "_step", stop)
    with pytest.raises(OSError, match="went away"):
        trained(out=tmp_path / "broken", steps=7, **mode)
    monkeypatch.setattr(loop.Trainer, "_step", plain)
    broken, watch = trained(out=tmp_path / "broken", steps=7, **mode)
    assert [line["step"] for line in watch.lines] == [5, 6, 7]
    assert same(tensors(whole), tensors(broken))
    if "finetune" in mode:
        parts = [load_file(outcome.folder / "model" / "model.safetensors") for outcome in (whole, broken)]
        assert same(*parts)
    assert logged(whole) == logged(broken)


def test_a_killed_process_goes_on_to_the_same_weights(trained, command, start, tmp_path):
    """Killed by the system in the middle, and gone on with by the command line's own function."""
    long = {"steps": 400, "save_every": 20}
    whole, _ = trained(out=tmp_path / "whole", **long)
    broken = start(command(tmp_path / "broken"))
    log = tmp_path / "broken" / "curves.jsonl"
    deadline = time.monotonic() + 600
    while not (log.is_file() and log.read_bytes().count(b"\n") >= 25):
        assert time.monotonic() < deadline
        assert broken.poll() is None, broken.communicate()
        time.sleep(0.002)
    broken.send_signal(signal.SIGKILL)
    broken.communicate()
    reached = log.read_bytes().count(b"\n")
    assert 25 <= reached < 400
    (kept,) = (tmp_path / "broken").glob("checkpoint-*")
    again, watch = trained(out=tmp_path / "broken", **long)
    assert watch.lines[0]["step"] == int(kept.name.rpartition("-")[2]) + 1 > 20
    assert same(tensors(whole), tensors(again))
    assert logged(whole) == logged(again)


def test_a_loss_that_is_no_number_stops_the_training(trained):
    with pytest.raises(RunFailed, match="The loss is nan at step 4: lower --lr"):
        trained(recipe="fail_at=3")


def test_a_learner_that_is_not_stored_gets_model_teacher_and_its_look(trained, trainers):
    outcome, watch = trained(policy=GATE, steps=30, lr=0.02, held_out=3)
    assert 0 == watch.lines[0]["bias"] < watch.lines[-1]["bias"]
    assert outcome.record["calibration"] == {"seen": 3}
    assert outcome.record["notes"] == ["It is a toy."]
    assert outcome.record["transferable"]
    assert trainers[0].learner.began == min(loop.STATISTICS_BLOCKS, trainers[0].plan.train_blocks)
    assert isinstance(trainers[0].learner, Learner)


def test_saving_in_half_is_half_the_size(trained, tmp_path):
    whole, _ = trained(out=tmp_path / "whole")
    half, _ = trained(out=tmp_path / "half", weights_dtype="float16")
    assert {tensor.dtype for tensor in tensors(half).values()} == {torch.float16}
    assert torch.allclose(tensors(whole)["weight"], tensors(half)["weight"].float(), atol=1e-3)


def test_the_rate_rises_and_falls():
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.1 <= rates[-1] < 0.102
    assert learning_rate(0, 1, 1.0) == 1.0


def test_every_block_comes_once_a_round_whatever_the_processes():
    orders = [BlockOrder(seed=3, count=12, rows=2, passes=3, processes=2, process=process) for process in (0, 1)]
    for epoch in range(3):
        seen = [index for order in orders for part in order.batches(epoch) for index in part]
        assert sorted(seen) == list(range(12))
    alone = BlockOrder(seed=3, count=5, rows=2, passes=1, processes=1, process=0)
    places = [index for step in range(10) for part in alone.batches(step) for index in part]
    assert [sorted(places[start : start + 5]) for start in range(0, 20, 5)] == [list(range(5))] * 4
    assert len({tuple(places[start : start + 5]) for start in range(0, 20, 5)}) > 1
    assert alone.blocks_seen(2, 1) == sorted(places[:4])
