"""Checks of what a run needs on this machine, each with what to do where something is missing."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from evictbench import hub, registry
from evictbench.errors import UserError
from evictbench.models import bundled
from evictbench.models.cache_folder import cache_folder

Status = Literal["ok", "warn", "missing"]


@dataclass(frozen=True)
class Check:
    """The result of one check. status: "missing" stops all runs, "warn" some. remedy: what to do, "" if nothing."""

    name: str
    status: Status
    sentence: str
    remedy: str = ""


def report() -> list[Check]:
    """Run all checks. None of them downloads anything, hangs or raises."""
    checks = [_python(), _torch(), *_devices(), *map(_package, ("transformers", "lm-eval", "wonderwords")), _bundled()]
    checks += [_hub(), _cache(), _results(), *_entries()]
    return checks


def _python() -> Check:
    return Check("python", "ok", f"Python {platform.python_version()} at {sys.executable}.")


def _torch() -> Check:
    check = _package("torch")
    if check.status == "missing":
        return check
    try:
        import torch
    except Exception as error:
        return Check("torch", "missing", f"torch {version('torch')} does not import: {error}", "Install torch again.")
    threads = f"{torch.get_num_threads()} CPU thread{'s' if torch.get_num_threads() > 1 else ''}"
    return Check("torch", check.status, f"torch {torch.__version__}, {threads}.", check.remedy)


def _devices() -> Iterator[Check]:
    import psutil

    memory = psutil.virtual_memory()
    cores = psutil.cpu_count(logical=False) or os.cpu_count()
    yield Check("cpu", "ok", f"{cores} cores; {_gib(memory.available)} of {_gib(memory.total)} memory free.")
    try:
        import torch

        count = torch.cuda.device_count()
        for index in range(count):
            properties = torch.cuda.get_device_properties(index)
            yield Check(f"cuda:{index}", "ok", f"{properties.name}, {_gib(properties.total_memory)}.")
    except Exception as error:
        yield Check("cuda", "warn", f"CUDA is there but does not answer: {error}", "Check the driver with nvidia-smi.")
        return
    if not count:
        yield Check("cuda", "warn", "No CUDA GPU: models run on the CPU.", "Fine for the bundled model.")


def _package(name: str) -> Check:
    """Whether a package is installed in a version that evictbench's own metadata allows."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in requires("evictbench") or []]
    except PackageNotFoundError:
        requirements = []
    wanted = next((requirement for requirement in requirements if requirement.name == name), None)
    allowed = str(wanted.specifier) if wanted else ""
    install = f"pip install '{name}{allowed}'"
    try:
        installed = version(name)
    except PackageNotFoundError:
        return Check(name, "missing", f"{name} is not installed.", install)
    if wanted and not wanted.specifier.contains(installed, prereleases=True):
        return Check(name, "warn", f"{name} {installed} is outside the supported versions, {allowed}.", install)
    return Check(name, "ok", f"{name} {installed}" + (f" (supported: {allowed})." if allowed else "."))


def _bundled() -> Check:
    name = f"model {bundled.NAME}"
    if bundled.is_converted():
        return Check(name, "ok", f"Converted, in {bundled.converted_folder()}.")
    if bundled.find_gguf() is None:
        return Check(name, "missing", f"The package {bundled.PACKAGE} is not installed.", bundled.INSTALL)
    return Check(name, "ok", f"Installed; its first use converts it into {bundled.converted_folder()}.")


def _hub() -> Check:
    reason = hub.why_unreachable(timeout=4)
    if reason is None:
        return Check("hub", "ok", "The model hub answers.")
    return Check(
        "hub",
        "warn",
        f"The model hub is out of reach ({reason}).",
        "The bundled model, local folders and models in the hub's local cache still work.",
    )


def _cache() -> Check:
    return _writable("cache", cache_folder(), "Set EVICTBENCH_CACHE to a folder that can be written.")


def _results() -> Check:
    return _writable("results", Path("results/runs").absolute(), "Run where you can write, or say --out FOLDER.")


def _writable(name: str, folder: Path, remedy: str) -> Check:
    """Whether files can be written to a folder, or to the folder in which it would be made."""
    import shutil

    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check(name, "missing", f"{folder} cannot be written.", remedy)
    free = shutil.disk_usage(existing).free
    status: Status = "ok" if free > 2 * 2**30 else "warn"
    return Check(name, status, f"{folder}, {_gib(free)} free.", "" if status == "ok" else "Make room.")


def _entries() -> Iterator[Check]:
    """Whether every installed policy and suite loads."""
    for kind, group, load in (
        ("policies", registry.POLICIES, registry.load_policy),
        ("suites", registry.SUITES, registry.load_suite),
    ):
        try:
            names = registry.names(group)
        except UserError as error:
            yield Check(kind, "missing", str(error), "Uninstall one of the two.")
            continue
        broken = []
        for name in names:
            try:
                load(name)
            except Exception as error:
                broken.append(f"{name}: {error}")
        if not names:
            yield Check(kind, "missing", f"No {kind} are installed.", "Install evictbench again: pip install -e .")
        elif broken:
            yield Check(
                kind, "warn", f"Of {len(names)} {kind}, some do not load: {'; '.join(broken)}", "Fix or remove."
            )
        else:
            yield Check(kind, "ok", f"{', '.join(names)}.")


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
