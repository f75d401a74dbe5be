"""The tasks as lm-eval loads them, and what importing the suite costs."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import yaml

from evictbench.errors import UserError
from evictbench.suites.ruler import SUITE
from evictbench.suites.ruler.documents import documents as load
from evictbench.suites.ruler.tasks import TASKS, VERSION


@pytest.fixture(scope="module")
def suite(prepare):
    return prepare(context=4096, limit=3)


@pytest.fixture(scope="module")
def loaded(suite):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(SUITE.folder), include_defaults=False, metadata=dict(suite.metadata))
    assert manager.all_tasks == sorted(TASKS)
    return manager.load(list(suite.tasks))["tasks"]


def test_all_thirteen_are_built_from_the_prepared_documents(suite, loaded):
    assert set(loaded) == set(TASKS)
    for name, task in loaded.items():
        assert task.eval_docs is suite.metadata["ruler_samples"][name]
        assert task.VERSION == VERSION
        assert list(task.aggregation()) == ["score"]
        assert task.higher_is_better() == {"score": True}
        assert task.aggregation()["score"]([1.0, 0.0, 0.5]) == 0.5
        assert task.config.generation_kwargs["max_gen_toks"] == TASKS[name].answer_tokens
        assert task.config.generation_kwargs["until"] == []
        assert task.config.generation_kwargs["do_sample"] is False


def test_prompts_and_scores_through_lm_eval(loaded):
    for name, task in loaded.items():
        doc = task.eval_docs[1]
        task.build_all_requests(limit=2)
        request = task.instances[1]
        assert request.args[0] == f"{doc['input']} {doc['gen_prefix']}"
        assert task.process_results(doc, [" ".join(doc["outputs"])]) == {"score": 1.0}
        assert task.process_results(doc, ["nothing of the kind"]) == {"score": 0.0}
        if TASKS[name].metric == "all" and len(doc["outputs"]) > 1:
            assert task.process_results(doc, [doc["outputs"][0]]) == {"score": 1 / len(doc["outputs"])}
        if TASKS[name].metric == "part":
            assert task.process_results(doc, [doc["outputs"][0]]) == {"score": 1.0}


def test_settings_can_be_dumped_and_copied(suite, loaded):
    samples = suite.metadata["ruler_samples"]["vt"]
    dumped = loaded["vt"].dump_config()
    assert dumped["metadata"]["ruler_samples"]["vt"] is samples
    assert copy.deepcopy(samples) is samples
    assert repr(samples) == "3 samples of vt at 4096 tokens, seed 0"


def test_tasks_that_were_not_prepared_say_so(suite):
    with pytest.raises(UserError, match=r"vt was not prepared"):
        load("vt", version=1)
    only = {"ruler_samples": {"cwe": suite.metadata["ruler_samples"]["cwe"]}}
    with pytest.raises(UserError, match=r"vt was not prepared"):
        load("vt", **only)


def test_task_files_agree_with_the_table():
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    files = {path.stem: yaml.load(path.read_text(), Loader) for path in SUITE.folder.glob("[!_]*.yaml")}
    assert set(files) == set(TASKS) == set(SUITE.tasks)
    for name, content in files.items():
        assert content["task"] == content["dataset_kwargs"]["task"] == name
        assert content["generation_kwargs"]["max_gen_toks"] == TASKS[name].answer_tokens
        scored_by_part = content.get("process_results", "").endswith(".score_part")
        assert scored_by_part == (TASKS[name].metric == "part")


def test_the_published_parameters():
    """peers' and upstream's table: limits, metrics and counts."""
    limits = {name: task.answer_tokens for name, task in TASKS.items()}
    assert limits == {name: 128 for name in limits if name.startswith("niah")} | {
        "vt": 30,
        "cwe": 120,
        "fwe": 50,
        "qa_1": 32,
        "qa_2": 32,
    }
    assert [name for name, task in TASKS.items() if task.metric == "part"] == ["qa_1", "qa_2"]
    shapes = {
        name: (s.haystack, s.key, s.value, s.keys, s.values, s.queries)
        for name, s in ((name, task.settings) for name, task in TASKS.items())
        if name.startswith("niah")
    }
    assert shapes == {
        "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
        "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
        "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
        "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
        "niah_multikey_2": ("needles", "words", "numbers", 1, 1, 1),
        "niah_multikey_3": ("needles", "uuids", "uuids", 1, 1, 1),
        "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
        "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
    }


def test_importing_the_suite_imports_nothing_heavy():
    script = (
        "import sys; from evictbench.suites.ruler import SUITE; assert len(SUITE.tasks) == 13; "
        "print([m for m in ('torch', 'transformers', 'datasets', 'lm_eval', 'pandas', 'numpy', 'scipy', "
        "'wonderwords', 'huggingface_hub') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    assert run.stdout.strip() == "[]"
