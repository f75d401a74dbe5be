"""Every Python block of the pages runs as it stands, but that a tiny model is in the place of a large one."""

import json
import re
import sys
import tomllib
import warnings
from functools import partial

import pytest
from pages import PAGES, ROOT, blocks, commands

FIRST_POLICY, FIRST_SUITE = ROOT / "docs/add-a-policy.md", ROOT / "docs/add-a-suite.md"
GUIDES = (FIRST_POLICY, FIRST_SUITE)
"""Pages whose blocks are files, and not programs."""

PROGRAMS = [block for page in PAGES if page not in GUIDES for block in blocks(page, "python")]


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: f"{block.page.name}:{block.line}")
def test_program(block, request, tiny, tmp_path, monkeypatch):
    if "results(" in block.text:
        monkeypatch.chdir(request.getfixturevalue("results"))
    source = block.text.replace("Qwen/Qwen3-8B", str(tiny)).replace('"gsm8k_cot"', repr(sums(tmp_path)))
    names = {"__name__": "__page__"}
    if "simple_evaluate(" in source:  # reading the names of lm-eval's own tasks takes longer than all else here
        import lm_eval.evaluator as evaluator

        monkeypatch.setattr(evaluator, "TaskManager", partial(evaluator.TaskManager, include_defaults=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        exec(compile(source, f"{block.page.name}:{block.line}", "exec"), names)
    if "found" in names:
        assert names["found"]["results"]["sums"]["exact_match,none"] in (0, 0.5, 1)
    if "cache" in names and names["cache"].seen:
        bound = names["cache"].budget.tokens if names["cache"].policy.enforces_budget else float("inf")
        assert all(0 < row.occupancy.largest <= bound for row in names["cache"].rows)
    if "output" in names:  # every token was read once, but for the last, which nothing follows
        assert names["cache"].get_seq_length() == names["output"].shape[1] - 1


def sums(folder):
    """An lm-eval task of two questions in a file, in the place of one that a network would be asked for."""
    data = folder / "sums.jsonl"
    data.write_text(
        "".join(json.dumps({"question": f"{'1 + ' * i}1 =", "answer": f"{i + 1}"}) + "\n" for i in (1, 200))
    )
    return {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match"}],
    }


def files(page, folder):
    """Write the blocks that the page names a file for (`name` at the end of the line above) into a folder."""
    written = []
    for block in blocks(page):
        named = re.search(r"`([\w/.-]+\.\w+)`(, anywhere)?:$", block.before)
        if named:
            path = folder / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            written.append(named[1])
    return written


def test_the_policy_guide_is_proved_and_plotted(tmp_path, tiny, run_here):
    """The policy, its twin and its curve, as somebody would who follows the page in a clone."""
    for item in (ROOT / "tests").iterdir():
        (tmp_path / "tests").mkdir(exist_ok=True)
        if item.name != "policies":
            (tmp_path / "tests" / item.name).symlink_to(item)
    (tmp_path / "tests/policies").mkdir()
    for item in (ROOT / "tests/policies").glob("*.py"):
        (tmp_path / "tests/policies" / item.name).symlink_to(item)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert files(FIRST_POLICY, tmp_path) == ["keydiff.py", "tests/policies/test_keydiff.py"]
    assert len((tmp_path / "keydiff.py").read_text().splitlines()) <= 40
    proof, sweep, plot = (list(command.words[1:]) for command in commands(FIRST_POLICY))
    assert proof[:2] == ["-m", "pytest"]
    proved = run_here([*proof[1:], "-p", "no:cacheprovider"], tmp_path)
    assert proved.returncode == 0, proved.stdout[-3000:]
    assert "1 passed" in proved.stdout
    sweep[sweep.index("--limit") + 1] = "1"
    swept = run_here(["evictbench", *sweep, "--model", str(tiny)], tmp_path)
    assert swept.returncode == 0, swept.stderr[-3000:]
    assert "keydiff" in swept.stdout
    plotted = run_here(["evictbench", *plot], tmp_path)
    assert plotted.returncode == 0, plotted.stderr[-3000:]
    assert list((tmp_path / "results/keydiff-plots").glob("budget-*.png"))


def test_the_suite_guide_runs(tmp_path, tiny, monkeypatch, capsys):
    from evictbench import registry
    from evictbench.cli.app import main
    from evictbench.store import run_folder

    written = files(FIRST_SUITE, tmp_path)
    assert [name.rpartition("/")[2] for name in written] == [
        "pyproject.toml",
        "__init__.py",
        "documents.py",
        "rooms.yaml",
    ]
    project = tomllib.loads((tmp_path / "rooms/pyproject.toml").read_text())
    entries = project["project"]["entry-points"]["evictbench.suites"]
    # What `pip install -e rooms` leaves behind, without asking a network for a build.
    metadata = tmp_path / "site/rooms-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rooms\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (metadata / "entry_points.txt").write_text(f"[evictbench.suites]\n{lines}")
    monkeypatch.syspath_prepend(str(tmp_path / "rooms"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    registry._entries.cache_clear()
    try:
        given = [list(command.words[1:]) for command in commands(FIRST_SUITE) if command.words[0] == "evictbench"]
        assert [words[0] for words in given] == ["list", "run", "run"]
        for words in given:
            with pytest.raises(SystemExit) as ended:
                main([*words, "--model", str(tiny)] if words[0] == "run" else words)
            output = capsys.readouterr()
            assert not ended.value.code, output.err
            assert "rooms" in output.out
        runs = [run_folder.read_run(path.parent) for path in (tmp_path / "results/runs").rglob("run.json")]
        assert {run["identity"]["protocol"]["question"] for run in runs} == {"seen", "unseen"}
        from rooms.documents import grade, make

        (doc, *_), more = make(0, 2), make(0, 3)
        assert more[0] == doc
        assert grade(doc, [f" {doc['answer']}."]) == {"score": 1.0}
        assert grade(doc, ["none"]) == grade(doc, [""]) == {"score": 0.0}
    finally:
        registry._entries.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "rooms"]:
            del sys.modules[name]
