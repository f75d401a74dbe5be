"""The tasks as the engine loads them: their documents, prompts, limits, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from evictbench.errors import UserError
from evictbench.evaluation import tasks
from evictbench.suites.bbh import SUITE, grade
from evictbench.suites.bbh.prepare import documents
from evictbench.suites.bbh.prompts import from_file, from_lm_eval
from evictbench.suites.bbh.tasks import COT, DIRECT, SUBJECTS

SHARED = Path(__file__).parents[4] / "shared" / "data"
LM_EVAL_FOLDERS = {"cot_fewshot": COT, "fewshot": DIRECT}

needs_bbh = pytest.mark.skipif(not SHARED.is_dir(), reason="BBH itself is not part of the project")


def lm_eval_task(folder: str, subject: str, records):
    """lm-eval's own task, on these records."""
    import lm_eval
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    root = Path(lm_eval.__file__).parent / "tasks" / "bbh" / folder
    config = yaml.safe_load((root / f"{subject}.yaml").read_text(encoding="utf-8"))
    shared = yaml.safe_load((root / config.pop("include")).read_text(encoding="utf-8"))
    config = shared | config | {"dataset_path": "", "custom_dataset": lambda **_: {"test": Dataset.from_list(records)}}
    return ConfigurableTask(config=config)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_documents(prepare):
    prepared = prepare("bbh_boolean_expressions", "bbh_snarks_direct")
    assert sorted(prepared.data) == [
        "bbh/boolean_expressions.json",
        "bbh/snarks.json",
        "cot-prompts/boolean_expressions",
        "cot-prompts/snarks",
    ]
    loaded = tasks.load_tasks(SUITE, prepared)
    assert [doc["target"] for doc in loaded["bbh_boolean_expressions"].eval_docs] == ["False", "True"]
    assert tasks.score(loaded["bbh_boolean_expressions"], 0, "So the answer is False").score == 1.0
    assert tasks.score(loaded["bbh_snarks_direct"], 0, " (A)").score == 1.0


@pytest.mark.parametrize("folder", LM_EVAL_FOLDERS)
def test_prompts_are_those_of_lm_eval(prepare, data_dir, folder):
    for subject in ("boolean_expressions", "object_counting", "snarks"):
        name = next(name for name, of in LM_EVAL_FOLDERS[folder].items() if of == subject)
        ours = tasks.load_tasks(SUITE, prepare(name))[name]
        records = json.loads((data_dir / "bbh" / f"{subject}.json").read_text())["examples"]
        theirs = lm_eval_task(folder, subject, records)
        for index, record in enumerate(records):
            assert tasks.render(ours, ours.eval_docs[index], None) == theirs.fewshot_context(record, num_fewshot=3)


def test_limits_and_stops(prepare):
    loaded = tasks.load_tasks(SUITE, prepare("bbh_snarks", "bbh_snarks_direct"))
    cot, direct = loaded["bbh_snarks"].config, loaded["bbh_snarks_direct"].config
    assert cot.generation_kwargs == {"max_gen_toks": 1024, "do_sample": False, "until": ["\nQ:", "</s>"]}
    assert direct.generation_kwargs == {"max_gen_toks": 256, "do_sample": False, "until": ["\nQ:", "\n\n", "</s>"]}
    for task in loaded.values():
        assert task.config.metadata["chat"] is False
        assert tasks.version_of(task) == "1.1"


def test_there_is_a_file_for_every_task():
    for folder, names in (("cot", COT), ("direct", DIRECT)):
        files = {path.stem: yaml.safe_load(path.read_text()) for path in (SUITE.folder / folder).glob("[!_]*.yaml")}
        assert files == {
            subject: {"include": f"_{folder}.yaml", "task": name, "dataset_kwargs": {"task": name}}
            for name, subject in names.items()
        }


def test_every_prompt_of_lm_eval_is_the_one_we_know():
    found = {}
    for subject in SUBJECTS:
        shots = from_lm_eval(subject)
        cot, direct = shots.chain_of_thought("?"), shots.direct("?")
        assert "canary" not in cot.lower()
        assert "\\n" not in cot
        assert cot.endswith("Q: ?\nA: Let's think step by step.\n")
        assert direct.endswith("Q: ?\nA:")
        found[subject] = (len(cot), digest(cot), len(direct), digest(direct))
    assert found == SNAPSHOT


def test_examples_are_graded_right():
    for subject in SUBJECTS:
        for example in from_lm_eval(subject).examples:
            doc = {"target": example.answer}
            assert grade.chain_of_thought(doc, [example.reasoning])["score"] == 1.0
            assert grade.direct(doc, [f" {example.answer}"])["score"] == 1.0


@needs_bbh
def test_the_authors_files_give_the_same_prompts():
    for subject in SUBJECTS:
        assert from_file(SHARED / "bbh" / "cot-prompts" / f"{subject}.txt") == from_lm_eval(subject)


@needs_bbh
def test_real_questions(prepare):
    prepared = prepare(*SUITE.tasks, data_dir=SHARED)
    assert len(prepared.tasks) == 54
    made = prepared.metadata["bbh_documents"]
    assert sum(len(made[name]) for name in COT) == sum(len(made[name]) for name in DIRECT) == 6511
    for folder, names in LM_EVAL_FOLDERS.items():
        for name, subject in names.items():
            records = json.loads((SHARED / "bbh" / "bbh" / f"{subject}.json").read_text(encoding="utf-8"))["examples"]
            theirs = lm_eval_task(folder, subject, records[:3])
            for index, record in enumerate(records[:3]):
                assert made[name][index]["input"] == theirs.fewshot_context(record, num_fewshot=3)
    everything = "".join(made[name][0]["input"] for name in prepared.tasks)
    assert digest(everything) == FIRST_QUESTIONS


@needs_bbh
def test_every_target_is_graded_right(prepare):
    made = prepare(*COT, data_dir=SHARED).metadata["bbh_documents"]
    for name in COT:
        for target in {doc["target"] for doc in made[name]}:
            doc = {"target": target}
            assert grade.chain_of_thought(doc, [f"... So the answer is {target}"])["score"] == 1.0
            assert grade.chain_of_thought(doc, [f"... So the answer is {target}."])["score"] == 1.0
            assert grade.direct(doc, [f" {target}"])["score"] == 1.0


def test_what_is_missing_is_skipped_unless_asked_for(prepare, tmp_path):
    prepared = prepare()
    assert prepared.tasks == ("bbh_boolean_expressions", "bbh_object_counting", "bbh_snarks")
    assert len(prepared.skipped) == 24
    assert "BBH navigate" in prepared.skipped["bbh_navigate"]
    with pytest.raises(UserError, match=r"has no BBH navigate data: looked for navigate\.json or"):
        prepare("bbh_navigate")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"No task of BBH can run: The folder .*empty has no BBH boolean_expressions"):
        prepare(data_dir=tmp_path / "empty")


def test_prompts_in_a_folder_come_first(prepare, data_dir):
    (data_dir / "cot-prompts").mkdir()
    file = data_dir / "cot-prompts" / "snarks.txt"
    shot = "Q: Which?\n(A) {n}\nA: Let's think step by step.\nIt is {n}. So the answer is (A)."
    shots = "\n\n".join(shot.format(n=n) for n in range(3))
    file.write_text(f"a canary\n-----\nPick one.\n\n{shots}")
    cot, direct = prepare("bbh_snarks", "bbh_snarks_direct").metadata["bbh_documents"].values()
    assert cot[0]["input"].startswith("Pick one.\n\nQ: Which?\n(A) 0\nA: Let's think step by step.\nIt is 0. So")
    assert direct[0]["input"].startswith("Pick one.\n\nQ: Which?\n(A) 0\nA: (A)\n\nQ: Which?\n(A) 1\nA: (A)\n\n")
    file.write_text("a canary\n-----\nPick one.\n\nQ: Which?")
    with pytest.raises(UserError, match=r"snarks\.txt is not a prompt of BBH: .* found 0 of them\."):
        prepare("bbh_snarks")
    file.write_text(f"a canary\n-----\nPick one.\n\n{shots}".replace("So the answer is", "Thus"))
    with pytest.raises(UserError, match=r"snarks\.txt: an example does not end with its answer"):
        prepare("bbh_snarks")


def test_bad_data_is_a_sentence(prepare, data_dir):
    file = data_dir / "bbh" / "snarks.json"
    file.write_text('{"examples": [{"input": "Which?"}]}')
    with pytest.raises(UserError, match=r"snarks\.json: record 1 has no field 'target'\."):
        prepare("bbh_snarks")
    file.write_text('{"questions": []}')
    with pytest.raises(UserError, match=r"snarks\.json is neither a list of records nor an object with"):
        prepare()
    with pytest.raises(UserError, match=r"Unknown task 'bbh_snark' of BBH: did you mean bbh_snarks"):
        prepare("bbh_snark")
    with pytest.raises(UserError, match="bbh_snarks was not prepared"):
        documents("bbh_snarks", version=1)


def test_protocols_name_tasks_that_there_are():
    assert set(SUITE.protocols) == {"default", "direct", "distillcache"}
    for protocol in SUITE.protocols.values():
        assert set(protocol.tasks) <= set(SUITE.tasks)
        assert len(protocol.tasks) == 27
        assert protocol.sampling.temperature == 0
    assert SUITE.protocols["distillcache"].max_new_tokens == 512


FIRST_QUESTIONS = "c6cf140e1b513941"
# characters and hash of the worked prompt, then of the direct one
SNAPSHOT = {
    "boolean_expressions": (1816, "0d2486f86cc04f40", 195, "061d859f060dd663"),
    "causal_judgement": (3688, "346ad842f430a54c", 2158, "92df9e6e221e8fa3"),
    "date_understanding": (1202, "a3e93a5ffe73d3d3", 625, "27f7bcdf7f9993c9"),
    "disambiguation_qa": (3603, "6ed7cb3a21a4a12f", 981, "ae674a1091862f33"),
    "dyck_languages": (2440, "f2054aba931e2e5c", 460, "3921d9bbf5b3ca00"),
    "formal_fallacies": (4506, "79010fd6ec85439a", 1655, "5cb15f8fd328ead6"),
    "geometric_shapes": (4866, "4a2a6a01b0e231a2", 869, "29c2d0eea413cf1e"),
    "hyperbaton": (3149, "564e7c7acda3448e", 471, "a091b0d92dcd9761"),
    "logical_deduction_five_objects": (2540, "b09ce22b1f1e8de5", 1333, "c68c8d01dbe31f2b"),
    "logical_deduction_seven_objects": (2540, "b09ce22b1f1e8de5", 1333, "c68c8d01dbe31f2b"),
    "logical_deduction_three_objects": (2540, "b09ce22b1f1e8de5", 1333, "c68c8d01dbe31f2b"),
    "movie_recommendation": (2156, "61fe7cb0003be876", 715, "b191ee62845d61ea"),
    "multistep_arithmetic_two": (2415, "f56ce43eceb40088", 207, "1c2e96b4906aeaf3"),
    "navigate": (2182, "dfd9ed587b7c216d", 683, "a5479c33b4ef8875"),
    "object_counting": (1453, "b2db2b9a9ed79a6d", 525, "e7a28f9ed0670e32"),
    "penguins_in_a_table": (2421, "124f1769ffd0b726", 1350, "b3c2c530be6976e4"),
    "reasoning_about_colored_objects": (2330, "a8eb5c612167a5e1", 1267, "d4bfd581b541b047"),
    "ruin_names": (3516, "f7550cec459399e8", 713, "4e72f5de75c99aa0"),
    "salient_translation_error_detection": (6165, "c662ab4067bb9b58", 3502, "5c300223be5b2b61"),
    "snarks": (3149, "df29ce84625a3481", 1067, "7114ffb6f5d6cc89"),
    "sports_understanding": (856, "44075411451a262e", 399, "dae3bf0c87a077a1"),
    "temporal_sequences": (3058, "4208fcc1cf0f1668", 1906, "6c6d1405b1523291"),
    "tracking_shuffled_objects_five_objects": (2639, "2ef66004085f2c10", 1480, "5471ccde0dd9acfe"),
    "tracking_shuffled_objects_seven_objects": (2639, "2ef66004085f2c10", 1480, "5471ccde0dd9acfe"),
    "tracking_shuffled_objects_three_objects": (2639, "2ef66004085f2c10", 1480, "5471ccde0dd9acfe"),
    "web_of_lies": (2980, "d4a7729bbf981d5c", 657, "ab47550fc17904ac"),
    "word_sorting": (2199, "d839bb3d6638f800", 424, "3b07dc4f0c947ab0"),
}
