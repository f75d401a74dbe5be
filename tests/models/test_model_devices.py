"""Where weights go: decided from sizes, so tested without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from evictbench.errors import UserError
from evictbench.models import devices
from evictbench.models.safetensors_files import read_headers

pytestmark = pytest.mark.engine

GIB = 2**30


@pytest.mark.parametrize(
    ("weights", "gpus", "wanted"),
    [
        (16, [80], {"": "cuda:0"}),
        (16, [80] * 8, {"": "cuda:0"}),
        (62, [80] * 8, "auto"),
        (140, [80] * 8, "auto"),
        (62, [80], {"": "cuda:0"}),
        (20, [24], {"": "cuda:0"}),
    ],
)
def test_one_gpu_while_caches_have_room_then_all(weights, gpus, wanted):
    assert devices.gpu_map(weights * GIB, [gpu * GIB for gpu in gpus]) == wanted


@pytest.mark.parametrize(("weights", "gpus"), [(62, [24]), (700, [80] * 8)])
def test_more_than_all_gpus_is_refused(weights, gpus):
    with pytest.raises(UserError, match=rf"The weights take {weights}\.0 GiB"):
        devices.gpu_map(weights * GIB, [gpu * GIB for gpu in gpus])


def test_device_map_without_a_gpu(monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.device_map("auto", [], None, "auto") is None
    assert devices.device_map("cpu", [], None, "auto") is None
    assert devices.device_map("cuda:1", [], None, "auto") == {"": "cuda:1"}
    assert devices.device_map("balanced", [], None, "auto") == "balanced"


@pytest.mark.parametrize(("dtype", "size"), [("auto", 4), ("float32", 4), ("bfloat16", 2)])
def test_weight_bytes_are_counted_from_the_files(tmp_path, tiny_llama, dtype, size):
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    files = sorted(Path(tmp_path).glob("*.safetensors"))
    assert len(files) > 1
    assert devices.weight_bytes(read_headers(files).values(), model.config, dtype) == size * sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda", "sees none here"),
        ("cuda:3", "sees none here"),
        ("balanced", "sees none here"),
        ("gpu", "There is no device 'gpu'"),
        ("meta", "cannot be used"),
    ],
)
def test_devices_that_are_not_there(device, said, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=said):
        devices.check_device(device)


def test_gpu_number_beyond_the_last(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices.check_device("cuda:1")
    with pytest.raises(UserError, match=r"There is no cuda:2: torch sees 2 GPU"):
        devices.check_device("cuda:2")


def test_layers_parked_in_main_memory_are_refused():
    class Spread:
        hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}  # noqa: RUF012

    with pytest.raises(UserError, match="no room for all of big"):
        devices.refuse_offloading(Spread(), "big")
    Spread.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    devices.refuse_offloading(Spread(), "big")
    Spread.hf_device_map = {"": "cpu"}
    devices.refuse_offloading(Spread(), "big")
