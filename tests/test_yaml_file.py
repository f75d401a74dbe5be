"""A YAML key that is given twice is a sentence with file, key and line, wherever YAML is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from evictbench import yaml_file
from evictbench.errors import UserError

TWICE = [
    ("a: 1\nb: 2\na: 3\n", 3, "a", 1),
    ("a: 1\na: 1\n", 2, "a", 1),
    ("{a: 1, b: 2, a: 3}", 1, "a", 1),
    ("list:\n  - x: 1\n    y: 2\n    x: 3\n", 4, "x", 2),
    ("a: 1\n'a': 2\n", 2, "a", 1),
    ("1: x\n2: y\n1: z\n", 3, "1", 1),
    ("base: &base {a: 1}\nnext: *base\nnext: 2\n", 3, "next", 2),
]


@pytest.mark.parametrize(("text", "line", "key", "first"), TWICE)
def test_a_key_given_twice_is_named_with_its_lines(tmp_path: Path, text: str, line: int, key: str, first: int) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(text)
    for read in (yaml_file.load, yaml_file.check_keys):
        with pytest.raises(UserError) as raised:
            read(file)
        assert str(raised.value) == f"{file}, line {line}: the key {key} is given twice (first in line {first})."


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a: {x: 1}\nb: {x: 1}\n", {"a": {"x": 1}, "b": {"x": 1}}),
        ("", None),
        ("- 1\n- 1\n", [1, 1]),
        ("base: &base {a: 1}\nmore: {<<: *base, a: 2}\n", {"base": {"a": 1}, "more": {"a": 2}}),
        ("'1': x\n1: y\n", {"1": "x", 1: "y"}),
        ("on: 1\n", {True: 1}),
    ],
)
def test_everything_else_is_read_as_yaml(tmp_path: Path, text: str, content: object) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(text)
    assert yaml_file.load(file) == content


@pytest.mark.parametrize("text", [b"a: [1", b"a: \xff", b"[" * 2000, b"a: !function x.y", b"a: 1\n---\nb: 2\n"])
def test_what_is_no_yaml_is_a_sentence(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "some.yaml"
    file.write_bytes(text)
    with pytest.raises(UserError, match=r"some\.yaml is not YAML that can be read: ") as raised:
        yaml_file.load(file)
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match=r"nowhere\.yaml cannot be read: No such file or directory\.$"):
        yaml_file.load(tmp_path / "nowhere.yaml")


def test_a_file_with_tags_of_another_library_is_looked_at_and_not_built(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("include: _shared.yaml\ntask: x\nprocess: !function os.system\nmetadata:\n  version: 1\n")
    assert yaml_file.check_keys(file)["include"] == "_shared.yaml"


@pytest.mark.parametrize("twice", ["task.yaml", "_shared.yaml"])
def test_a_task_file_and_what_it_includes_are_looked_at(tmp_path: Path, twice: str) -> None:
    from evictbench.harness.suite import suite_for

    files = {
        "task.yaml": "include: _shared.yaml\ntask: twin\ndataset_path: nothing\n",
        "_shared.yaml": "output_type: generate_until\ntest_split: test\ndoc_to_text: input\ndoc_to_target: target\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text + ("repeats: 1\nrepeats: 2\n" if name == twice else ""))
    with pytest.raises(UserError, match=rf"{twice}, line \d: the key repeats is given twice"):
        suite_for(str(tmp_path / "task.yaml"))


def test_a_suites_own_task_files_are_looked_at(tmp_path: Path) -> None:
    from dataclasses import replace

    from evictbench.evaluation.tasks import load_tasks
    from evictbench.registry import load_suite
    from evictbench.suite import PreparedSuite

    (tmp_path / "task.yaml").write_text("task: twin\ntask: other\noutput_type: generate_until\n")
    suite = replace(load_suite("gsm8k"), folder=tmp_path)
    with pytest.raises(UserError, match=r"task\.yaml, line 2: the key task is given twice"):
        load_tasks(suite, PreparedSuite(tasks=("other",), metadata={}))
