"""Hub models fetched for real, from a stand-in hub on this machine: what is asked for, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

pytestmark = pytest.mark.engine

COMMIT = "0123456789abcdef0123456789abcdef01234567"

LOAD = """
import pathlib, sys
from evictbench import hub
from evictbench.models import load
from evictbench.errors import UserError
for name in sys.argv[1:]:
    try:
        source = load.resolve(name)
        print(load.load_config(source).model_type, load.weights_hash(source))
        folder = hub.snapshot(source.repo, source.revision)
        print("weights:", len(list(folder.glob("*.safetensors"))))
        print("parameters:", sum(p.numel() for p in load.load_model(source, "cpu").parameters()))
    except UserError as error:
        print(error)
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download needs: a repository's file list, and its files by commit."""

    folder: ClassVar[Path]
    served: ClassVar[list[str]]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        files = sorted(path.name for path in self.folder.iterdir())
        if path.startswith("/api/models/own/gated"):
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/own/tiny/tree/"):
            listing = [{"type": "file", "path": f, "oid": f, "size": len(self._content(f))} for f in files]
            self._answer(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})
        elif path in ("/api/models/own/tiny", "/api/models/own/tiny/revision/main") or path.endswith(COMMIT):
            info = {"id": "own/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self._answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        elif path.startswith(f"/own/tiny/resolve/{COMMIT}/") and path.rsplit("/", 1)[1] in files:
            name = path.rsplit("/", 1)[1]
            content = self._content(name)
            if self.command == "GET":
                self.served.append(name)
            etag = hashlib.sha256(content).hexdigest()
            self._answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        elif path == "/":
            self._answer(200, b"", {})
        elif path.startswith("/api/models/own/tiny/revision/"):
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _content(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def served(tmp_path, tiny_llama, monkeypatch):
    """A hub with own/tiny on it; the names of the files that were fetched."""
    repository = tmp_path / "repository"
    tiny_llama().save_pretrained(repository, max_shard_size="100KB")
    (repository / "pytorch_model.bin").write_bytes(b"pickle")
    (repository / "modeling_tiny.py").write_text("raise SystemExit('ran')")
    (repository / "consolidated.safetensors").write_bytes(b"the same weights once more")
    handler = type("TinyHub", (Hub,), {"folder": repository, "served": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    yield handler.served
    server.shutdown()


def load(*names: str, **environment: str) -> list[str]:
    """What a new process prints that loads config, hash and weights of each name, or the sentence it ends with."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_only_what_is_loaded_is_fetched_and_then_never_again(served):
    config, before, model = load("own/tiny")
    assert config == f"llama commit:{COMMIT}"
    assert before == "weights: 0", "the config came with weights"
    assert int(model.removeprefix("parameters: ")) > 50_000
    assert "config.json" in served
    weights = [name for name in served if name.endswith((".safetensors", ".bin", ".py"))]
    assert len(weights) == len(set(weights)) > 1
    assert all(name.startswith("model-0") for name in weights)
    # A hub out of reach: nothing listens on port 9.
    assert load("own/tiny", f"own/tiny@{COMMIT}", HF_ENDPOINT="http://127.0.0.1:9")[2::3] == [model, model]


def test_what_the_hub_refuses_is_a_sentence(served):
    assert load("own/none", "own/tiny@v9", "own/gated") == [
        "There is no model own/none on the hub, or it is private.",
        "The model own/tiny has no revision v9.",
        "The hub gives own/gated only to those who have accepted its licence: accept it on the model's page, then "
        "log in with `hf auth login`.",
    ]
