"""The page on the architecture names what is there, and leaves no module of the engine out."""

import ast
import re
from fnmatch import fnmatch

import pytest
from pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ENGINE = {file.name: file for file in (ROOT / "evictbench").glob("*.py") if not file.name.startswith("__")}
FILES = set(re.findall(r"[\w*]+\.py", PAGE))
NO_MODULES = {"samples.jsonl", "summary.json", "run.json", "keys.slots"}
NAMES = sorted(set(re.findall(r"`(\w+\.\w+)(?:\.\w+)*`", PAGE)) - FILES - NO_MODULES)
RUNS = {"run", "plan", "settings", "protocol", "records", "tasks", "prompts", "suite", "results_frame", "cli"}
CORE: tuple[str, ...] = (
    "attention",
    "cache",
    "eviction",
    "kernels",
    "pages",
    "passes",
    "placement",
    "policy",
    "shown",
    "slots",
)
CORE += ("deadlines", "reindex", "together", *(name[:-3] for name in ENGINE if name.startswith("paged")))
READERS = (
    "plot_command",
    "report",
    "gate_command",
    "catalogue",
    "records",
    "results_frame",
    "cli",
    "cli_results",
    "settings",
)


def members(tree: ast.Module) -> set[str]:
    """Functions, classes and what is in them, and names that are assigned."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


MEMBERS = {name[:-3]: members(ast.parse(file.read_text())) for name, file in ENGINE.items()}
CLASSES = {
    node.name: members(ast.Module([node], []))
    for file in ENGINE.values()
    for node in ast.parse(file.read_text()).body
    if isinstance(node, ast.ClassDef)
}


def imported(name: str, lazily: bool) -> set[str]:
    """The engine's modules, and torch, that a module imports; lazily: inside functions too."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.FunctionDef) and not lazily:
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module == "evictbench":
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                found.add(child.module.removeprefix("evictbench.").partition(".")[0])
            visit(child)

    visit(ast.parse(ENGINE[f"{name}.py"].read_text()))
    return found


def below(name: str, lazily: bool) -> set[str]:
    """All that a module imports, itself or through others."""
    found: set[str] = set()
    coming = [name]
    while coming:
        for other in imported(coming.pop(), lazily) - found:
            found.add(other)
            if f"{other}.py" in ENGINE:
                coming.append(other)
    return found


def test_every_module_has_its_place() -> None:
    assert [name for name in sorted(ENGINE) if not any(fnmatch(name, file) for file in FILES)] == []


def test_no_file_is_named_that_is_not_there() -> None:
    named = sorted(FILES - {"my_policy.py"})
    assert [file for file in named if not any(fnmatch(name, file) for name in ENGINE)] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_is_named_is_there(name: str) -> None:
    owner, _, member = name.partition(".")
    assert member in MEMBERS.get(owner, set()) | CLASSES.get(owner, set())


@pytest.mark.parametrize("name", CORE)
def test_the_cache_knows_of_no_runs(name: str) -> None:
    assert below(name, lazily=True) & RUNS == set()


@pytest.mark.parametrize("name", READERS)
def test_whoever_reads_results_loads_no_torch_first(name: str) -> None:
    assert below(name, lazily=False) & {"torch", "transformers", "lm_eval"} == set()
