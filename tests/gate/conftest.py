"""The gate as from the command line, away from a CI's own step summary."""

import pytest

from evictbench.cli import app


@pytest.fixture(autouse=True)
def _no_summary(monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)


@pytest.fixture
def gate(capsys):
    """Its exit code, stdout and stderr."""

    def call(*words):
        with pytest.raises(SystemExit) as ended:
            app.main(["gate", *map(str, words)])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return call
