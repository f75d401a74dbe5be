"""What `import evictbench` offers, and what the pages import besides: written down, so that it grows on purpose."""

import ast
import importlib
import inspect

import pytest
from pages import PAGES, ROOT, blocks

import evictbench

TOP = {"EvictionCache", "__version__", "results"}

SURFACE = {
    "evictbench.suite.datasets": {"Documents"},
    "evictbench": {"EvictionCache"},
    "evictbench.models.load": {"load_model", "resolve", "weights_hash"},
    "evictbench.policy": {"ModelShape", "Policy", "Step"},
    "evictbench.registry": {"parse_policy"},
    "evictbench.store.frame": {"COLUMNS", "cells"},
    "evictbench.suite": {"PreparedSuite", "Protocol", "Suite", "SuiteRequest"},
}
"""By module: what the pages use of it."""


def imported():
    """Module to names, of all Python blocks; of `from evictbench import models` the attributes that are used."""
    found = {}
    for page in PAGES:
        for block in blocks(page, "python"):
            tree = ast.parse(block.text)
            modules = {}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "evictbench":
                    names = {alias.name for alias in node.names}
                    if node.module == "evictbench":
                        found.setdefault("evictbench", set()).update(names & TOP)
                        modules |= {name: f"evictbench.{name}" for name in names - TOP}
                    else:
                        found.setdefault(node.module, set()).update(names)
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                    found.setdefault(modules[node.value.id], set()).add(node.attr)
    return {module: names for module, names in found.items() if not module.startswith("evictbench.policies")}


def test_import_evictbench_offers_this():
    assert set(evictbench.__all__) == TOP
    assert (ROOT / "evictbench/py.typed").is_file()


def test_pages_use_what_is_listed():
    used = imported()
    assert used.keys() <= SURFACE.keys()
    for module, names in used.items():
        assert names <= SURFACE[module], module


@pytest.mark.parametrize("name", sorted(f"{module}.{name}" for module, names in SURFACE.items() for name in names))
def test_has_types_and_docstring(name):
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    if not callable(thing):  # a table
        assert thing
        return
    assert len(inspect.getdoc(thing) or "") > 20
    # A dataclass's own default is its signature.
    assert not inspect.getdoc(thing).startswith(f"{attribute}(")
    signature = inspect.signature(thing)
    for parameter in signature.parameters.values():
        assert parameter.annotation is not parameter.empty or parameter.name == "self", parameter


def test_results_has_types_and_docstring():
    text = inspect.getdoc(evictbench.results)
    assert "UserError" in text
    assert "row per sample" in text
    assert inspect.signature(evictbench.results).return_annotation == "pd.DataFrame"
