"""The address of a Ray cluster is tried in a moment, before Ray tries it for minutes."""

from __future__ import annotations

import importlib.util
import socket
import threading

import pytest

from evictbench.errors import UserError
from evictbench.sweep import ray


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def silent():
    """A port of this machine where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return port


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "localhost:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_something_listens_is_left_to_ray(listening, address):
    ray.check_address(address.format(listening))


@pytest.mark.parametrize("address", ["", "auto", "local", "nonsense"])
def test_other_addresses_are_left_to_ray(address):
    ray.check_address(address)


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "[::1]:{}"])
def test_a_dead_address_is_one_sentence(silent, address, monkeypatch):
    address = address.format(silent)
    sentence = rf"No Ray cluster answers at RAY_ADDRESS={address.replace('[', '.').replace(']', '.')} \("
    with pytest.raises(UserError, match=sentence):
        ray.check_address(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UserError, match=sentence):
        ray.RayTasks(None)


def test_a_name_that_does_not_resolve_is_given_up_on(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: released.wait(30))
    with pytest.raises(UserError, match=r"no answer within 0\.1 seconds"):
        ray.check_address("cluster:6379", timeout=0.1)
    released.set()
