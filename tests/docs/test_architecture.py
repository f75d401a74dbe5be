"""The page on the architecture names what is there; import-linter's contracts hold; reading results loads no torch."""

import ast
import json
import re
import subprocess
import sys

import pytest
from pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PROSE = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
ENGINE = ROOT / "evictbench"
PATHS = sorted(set(re.findall(r"`([\w./-]+(?:\.\w+|/))`", PROSE)))
NAMES = sorted(set(re.findall(r"`((?:\w+\.)*(?:[A-Z]\w+|\w+_\w+))`", PROSE)))

READERS = ("store", "stats", "plot", "report", "gate", "terminal")
NO_READER_LOADS = ("torch", "transformers", "lm_eval", "datasets")
HELP_LOADS_NONE_OF = (*NO_READER_LOADS, "pandas", "matplotlib")


def modules(folder: str) -> list[str]:
    files = sorted((ENGINE / folder).rglob("*.py"))
    return [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]


def defined() -> dict[str, set[str]]:
    """The modules, from evictbench/ down, that define each class and function."""
    places: dict[str, set[str]] = {}
    for file in ENGINE.rglob("*.py"):
        module = ".".join(file.relative_to(ENGINE).with_suffix("").parts)
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                places.setdefault(node.name, set()).add(module)
    return places


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("part", sorted(item.name for item in ENGINE.iterdir() if (item / "__init__.py").is_file()))
def test_every_folder_has_its_line(part: str) -> None:
    assert f"**`{part}/`**" in PAGE


@pytest.mark.parametrize("file", sorted(file.name for file in ENGINE.glob("[!_]*.py")))
def test_every_module_beside_the_folders_has_its_line(file: str) -> None:
    assert f"**`{file}`**" in PAGE


@pytest.mark.parametrize("path", PATHS)
def test_every_path_is_there(path: str) -> None:
    assert (ENGINE / path).exists() or (ROOT / path).exists()


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(name: str) -> None:
    module, _, member = name.rpartition(".")
    places = defined().get(member, set())
    assert any(not module or f".{module}" in f".{place}" for place in places)


def test_what_is_not_there_would_be_found() -> None:
    assert {"cache/forward_plan.py", "evaluation/run.py", "store/", "pyproject.toml"} <= set(PATHS)
    assert {"UserError", "ForwardPlan", "EvictionCache"} <= set(NAMES)


def test_import_linter_s_contracts_hold() -> None:
    linted = python("-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))")
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_whoever_reads_results_loads_no_torch() -> None:
    """import-linter sees what each module imports itself; this is what all of them load."""
    names = [*(name for folder in READERS for name in modules(folder)), "evictbench.cli.app"]
    code = f"""
import importlib, json, sys
loads = {{}}
for name in {names!r}:
    importlib.import_module(name)
    for heavy in {NO_READER_LOADS!r}:
        if heavy in sys.modules:
            loads.setdefault(heavy, name)
print(json.dumps(loads))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}


def test_help_loads_nothing_heavy() -> None:
    code = """
import json, sys
from evictbench.cli.app import main
try:
    main(["--help"])
finally:
    print(json.dumps(sorted(sys.modules)))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    assert set(json.loads(done.stdout.splitlines()[-1])) & set(HELP_LOADS_NONE_OF) == set()
