"""The table of differences from the authors' code: the page is what the files say, and a wrong file is a sentence."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from evictbench.errors import UserError
from studies.authors import table
from studies.authors.table import FOLDER, ROOT, main, page, read, read_all

GOOD = {
    "policy": "h2o",
    "code": "owner/name@0123abc",
    "licence": "MIT",
    "command": "python -m studies.authors.h2o --checkout PATH",
    "items": [{"what": "They | and\n we.", "size": "1 entry", "reason": "So.", "test": None, "source": "section 1"}],
}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "h2o.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}), encoding="utf-8")
    return path


def test_the_page_is_what_the_files_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    assert capsys.readouterr().err == ""


def test_a_page_that_is_out_of_date_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "DOCUMENT", tmp_path / "authors.md")
    assert main(["--check"]) == 1
    assert "run python -m studies.authors.table" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0
    (tmp_path / "authors.md").write_text("other", encoding="utf-8")
    assert main(["--check"]) == 1


def test_every_named_test_exists() -> None:
    for differences in read_all(FOLDER):
        for item in differences.items:
            file, _, name = (item.test or "").partition("::")
            if name:
                tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
                assert name.partition("[")[0] in {
                    node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
                }, item.test


def test_a_file_as_a_section(tmp_path: Path) -> None:
    text = page([read(write(tmp_path))])
    assert "\n## h2o\n\nCode: [owner/name](https://github.com/owner/name/tree/0123abc) at `0123abc` (MIT). " in text
    assert "Again: `python -m studies.authors.h2o --checkout PATH`.\n" in text
    assert text.endswith("\n| They \\| and we. | 1 entry | So. | - | section 1 |\n")
    assert "\nNo public code.\n" in page([read(write(tmp_path, code="none", licence=None, command=None))])
    measured = read(write(tmp_path, code="none", licence="none", command="python -m studies.compare"))
    assert "\nNo public code. The sizes: `python -m studies.compare`.\n" in page([measured])
    both = read(write(tmp_path, code=["a/b@0123abc", "c/d@4567def"], licence=["MIT", "Apache-2.0"]))
    assert "at `0123abc` (MIT), [c/d](" in page([both])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"policy": "tova"}, "policy is tova, and the file is named h2o.yaml"),
        ({"code": "somewhere"}, "code is none, or like owner/name@0123abc, not 'somewhere'"),
        ({"licence": None}, "licence is a text, not None"),
        ({"licence": ["MIT", "MIT"]}, "1 repositories and 2 licences"),
        ({"command": None}, "command says what runs the code"),
        ({"code": "none"}, "without code there is no licence"),
        ({"items": []}, "items is a list of at least one comparison"),
        ({"items": ["x"]}, "item 1 is a mapping with what, size, reason, test, source"),
        ({"items": [{"what": "x"}]}, "item 1 lacks size, reason, source"),
        ({"items": [{**GOOD["items"][0], "why": "x"}]}, "item 1 has why, and knows what, size"),  # type: ignore[index]
        ({"items": [{**GOOD["items"][0], "size": 2}]}, "item 1: size is a text, not 2"),  # type: ignore[index]
        ({"items": [{**GOOD["items"][0], "test": "tests/no.py"}]}, "there is no file tests/no.py"),  # type: ignore[index]
    ],
)
def test_a_wrong_file_is_a_sentence(changes: dict[str, object], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        read(write(tmp_path, **changes))


def test_a_wrong_file_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    (tmp_path / "unheard_of.yaml").write_text(yaml.safe_dump({**GOOD, "policy": "unheard_of"}), encoding="utf-8")
    assert main(["--check"]) == 2
    assert "there is no policy unheard_of" in capsys.readouterr().err


def test_numbers_are_of_the_code_that_the_page_names() -> None:
    paths = sorted((ROOT / "tests/authors/data").glob("*/*.json"))
    assert {path.parent.name for path in paths} >= {"streaming_llm", "tova", "h2o", "snapkv"}
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        header = content.get("header", content)
        code = read(FOLDER / f"{path.parent.name}.yaml").code
        repository = header["repository"].removeprefix("https://github.com/")
        commits = [name.partition("@")[2] for name in code if name.partition("@")[0] == repository]
        assert any(header["commit"].startswith(commit) for commit in commits), path
