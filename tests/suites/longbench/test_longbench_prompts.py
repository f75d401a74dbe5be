"""Prompts word for word, the task files, the protocols, and what bad data says."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys

import pytest
import yaml
from longbench_records import record, write

from evictbench.errors import UserError
from evictbench.evaluation import tasks
from evictbench.suite import Sampling
from evictbench.suites.longbench import SUITE
from evictbench.suites.longbench.documents import documents as load
from evictbench.suites.longbench.tasks import E_TASKS, ENGLISH_AND_CODE, OFFICIAL, PROTOCOLS, TASKS, VERSION
from evictbench.suites.longbench.templates import TEMPLATES

# sha256 of dataset2prompt.json of THUDM/LongBench at 2e00731, as JSON with sorted keys
OFFICIAL_TEMPLATES = "bb89f011861ff65f8534f366632b99cc9d5681ae983c50f2537230faae16613f"

# sha256 of the rendered prompt of each task's second record, first 16 digits; where the chat template is allowed,
# it is that of the tests' tokenizer.
SNAPSHOTS = {
    "narrativeqa": "d205e4cd79586eeb",
    "qasper": "8c4b1a10315e5b6a",
    "multifieldqa_en": "759470030489fb8d",
    "multifieldqa_zh": "7c2e4d1284272ba6",
    "hotpotqa": "23abcd86a072f2d8",
    "2wikimqa": "23abcd86a072f2d8",
    "musique": "23abcd86a072f2d8",
    "dureader": "c2f7250aab1194b8",
    "gov_report": "d1e2e2464399c034",
    "qmsum": "f9e91fc2718d290f",
    "multi_news": "10d9a2cf5faa07a8",
    "vcsum": "4c003c6c1b564661",
    "trec": "4033fcd534d00b64",
    "triviaqa": "55ca905694cc97e3",
    "samsum": "79ffc46eb2c00720",
    "lsht": "e7b576f4d8b93d4c",
    "passage_count": "1d2b69e53e269e2d",
    "passage_retrieval_en": "52d4678ac57e13cf",
    "passage_retrieval_zh": "7be11bc6b34d2aad",
    "lcc": "65bdccd97c07370b",
    "repobench-p": "3bb134d2e1dc18ec",
    "qasper_e": "8c4b1a10315e5b6a",
    "multifieldqa_en_e": "759470030489fb8d",
    "hotpotqa_e": "23abcd86a072f2d8",
    "2wikimqa_e": "23abcd86a072f2d8",
    "gov_report_e": "d1e2e2464399c034",
    "multi_news_e": "10d9a2cf5faa07a8",
    "trec_e": "4033fcd534d00b64",
    "triviaqa_e": "55ca905694cc97e3",
    "samsum_e": "79ffc46eb2c00720",
    "passage_count_e": "1d2b69e53e269e2d",
    "passage_retrieval_en_e": "52d4678ac57e13cf",
    "lcc_e": "65bdccd97c07370b",
    "repobench-p_e": "3bb134d2e1dc18ec",
    "narrativeqa_rouge": "d205e4cd79586eeb",
    "qasper_rouge": "8c4b1a10315e5b6a",
    "multifieldqa_en_rouge": "759470030489fb8d",
    "hotpotqa_rouge": "23abcd86a072f2d8",
    "2wikimqa_rouge": "23abcd86a072f2d8",
    "musique_rouge": "23abcd86a072f2d8",
    "trec_rouge": "4033fcd534d00b64",
    "triviaqa_rouge": "55ca905694cc97e3",
    "passage_count_rouge": "1d2b69e53e269e2d",
    "passage_retrieval_en_rouge": "52d4678ac57e13cf",
    "lcc_rouge": "65bdccd97c07370b",
    "repobench-p_rouge": "3bb134d2e1dc18ec",
}

NO_CHAT = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}

QUESTIONS = {
    "narrativeqa": "\n\nNow, answer the question based on the story asconcisely as you can",
    "gov_report": "\n\nNow, write a one-page summary of the report.\n\nSummary:",
    "qmsum": "\n\nNow, answer the query based on the above meeting transcript",
    "multi_news": "\n\nNow, write a one-page summary of all the news.\n\nSummary:",
    "vcsum": "\n\n会议总结：",
    "trec": "\nWho wrote the number 1 into the log?",
    "lsht": "\nWho wrote the number 1 into the log?",
    "samsum": "\n\nWho wrote the number 1 into the log?",
    "passage_count": "\n\nPlease enter the final count of unique paragraphs",
    "lcc": "Next line of code:\n",
    "repobench-p": "Who wrote the number 1 into the log?Next line of code:\n",
}


@pytest.fixture(scope="module")
def loaded(prepare):
    """Every task, in the chat template where it is allowed."""
    prepared = prepare(*TASKS)
    return tasks.load_tasks(SUITE, prepared)


def rendered(loaded, tokenizer, task: str) -> str:
    doc = loaded[task].task_docs[1]
    return tasks.render(loaded[task], doc, tokenizer if tasks.uses_chat(loaded[task]) else None)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_templates_are_the_official_ones():
    assert digest(json.dumps(TEMPLATES, sort_keys=True)) == OFFICIAL_TEMPLATES
    assert set(TEMPLATES) == set(OFFICIAL)
    for template in TEMPLATES.values():
        assert template.count("{context}") == 1
        assert template.replace("{context}", "").replace("{input}", "").count("{") == 0


def test_prompt_snapshots(loaded, tokenizer):
    assert {task: digest(rendered(loaded, tokenizer, task))[:16] for task in TASKS} == SNAPSHOTS


def test_one_prompt_in_full(loaded, tokenizer):
    doc = loaded["lcc"].task_docs[0]
    code = "".join(f"def step_{i}(log: list[int]) -> int:\n    return log[{i}] + {i}\n\n" for i in range(12))
    assert rendered_first(loaded, tokenizer, "lcc") == (
        "Please complete the code given below. \n" + code.rstrip("\n") + "Next line of code:\n"
    )
    assert doc["context"] == "Please complete the code given below. \n" + code.rstrip("\n")


def rendered_first(loaded, tokenizer, task: str) -> str:
    return tasks.render(loaded[task], loaded[task].task_docs[0], None)


def test_the_chat_template_only_where_it_belongs(loaded, tokenizer):
    for task in TASKS:
        base = task.removesuffix("_e").removesuffix("_rouge")
        text = rendered(loaded, tokenizer, task)
        assert text.startswith("<s>user\n") == (base not in NO_CHAT), task
        assert text.endswith("<s>assistant\n") == (base not in NO_CHAT), task
        assert "\\n" not in text
        (prompt,) = list(tasks.prompts(loaded[task], tokenizer, chat=True, context_field="context", limit=1))
        # one at the start; the turns of this template begin with the same token, and those are its own
        turns = 2 if base not in NO_CHAT else 1
        assert list(prompt.ids).count(tokenizer.bos_token_id) == turns
        assert prompt.ids[0] == tokenizer.bos_token_id
        assert prompt.ids[1] != tokenizer.bos_token_id


def test_the_question_is_what_follows_the_context(loaded, tokenizer):
    for task in TASKS:
        doc = loaded[task].task_docs[1]
        assert doc["input"].startswith(doc["context"])
        question = doc["input"][len(doc["context"]) :]
        base = task.removesuffix("_e").removesuffix("_rouge")
        assert question.startswith(QUESTIONS.get(base, "\n\n")), task
        assert ("Who wrote the number 1 into the log?" in question) == ("{input}" in TEMPLATES[base]), task
        whole, seen = (
            next(iter(tasks.prompts(loaded[task], tokenizer, chat=False, context_field=field, limit=1)))
            for field in ("context", None)
        )
        assert seen.border is None
        assert 0 < whole.border < len(whole.ids)
        assert list(whole.ids) == list(seen.ids)


def test_prompts_and_scores_through_lm_eval(loaded):
    for name, task in loaded.items():
        doc = task.task_docs[0]
        best = tasks.score(task, 0, doc["answers"][0])
        assert best.score == pytest.approx(1.0, abs=1e-6), name
        assert tasks.score(task, 0, "nothing of the kind").score < 0.5, name
        assert tasks.score(task, 0, "").score == 0, name
        assert best.metrics["cut"] == 0
        assert best.metrics["words"] == 1000
        assert set(task.aggregation()) == set(best.metrics)
        assert float(TASKS[name].version) == task.VERSION


def test_task_files_agree_with_the_table():
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    files = {path.stem: yaml.load(path.read_text(), Loader) for path in SUITE.folder.glob("[!_]*.yaml")}
    assert set(files) == set(TASKS) == set(SUITE.tasks)
    for name, content in files.items():
        task = TASKS[name]
        assert content["task"] == content["dataset_kwargs"]["task"] == name
        assert content["generation_kwargs"] == {"max_gen_toks": task.answer_tokens, "until": []}
        assert content["process_results"] == f"evictbench.suites.longbench.grade.{task.metric}"
        assert content["metadata"].get("chat", True) == task.chat
        assert content["metadata"].get("ends", []) == list(task.ends)
        assert content["metadata"].get("min_new_tokens", 0) == task.min_new_tokens
        assert str(content["metadata"]["version"]) == task.version


def test_the_published_limits_and_metrics():
    limits = {name: task.answer_tokens for name, task in OFFICIAL.items()}
    for tokens, names in {
        32: "hotpotqa 2wikimqa musique triviaqa passage_count passage_retrieval_en passage_retrieval_zh",
        64: "multifieldqa_en multifieldqa_zh trec lsht lcc repobench-p",
        128: "narrativeqa qasper dureader samsum",
        512: "gov_report qmsum multi_news vcsum",
    }.items():
        assert {name for name in limits if limits[name] == tokens} == set(names.split())
    assert {name for name, task in OFFICIAL.items() if not task.chat} == NO_CHAT
    special = {name: (task.ends, task.min_new_tokens, task.version) for name, task in TASKS.items()}
    usual, samsum = ((), 0, VERSION), (("\n",), 1, "1.1")
    assert special == {name: samsum if name in ("samsum", "samsum_e") else usual for name in TASKS}
    first_line = {name for name, task in OFFICIAL.items() if task.metric.startswith(("first", "classification"))}
    assert first_line == {"trec", "triviaqa", "samsum", "lsht"}


def test_protocols():
    assert len(OFFICIAL) == 21
    assert PROTOCOLS["default"].tasks == ENGLISH_AND_CODE
    assert len(ENGLISH_AND_CODE) == 16
    assert len(PROTOCOLS["longbench_e"].tasks) == len(E_TASKS) == 13
    assert set(PROTOCOLS["bilingual"].tasks) == set(OFFICIAL)
    assert all(protocol.sampling == Sampling() and protocol.repeats == 1 for protocol in PROTOCOLS.values())
    theirs = PROTOCOLS["distillcache"]
    assert theirs.max_new_tokens == 512
    assert len(theirs.tasks) == 15
    assert all("rouge_l" in TASKS[name].metric for name in theirs.tasks)
    assert not any(name.startswith("2wikimqa") for name in theirs.tasks)
    assert all(name in TASKS for protocol in PROTOCOLS.values() for name in protocol.tasks)
    lengths = {name: protocol for name, protocol in PROTOCOLS.items() if protocol.context is not None}
    assert {name: protocol.context for name, protocol in lengths.items()} == {
        "distillcache_2k": 2048,
        "distillcache_4k": 4096,
        "distillcache_8k": 8192,
    }
    for protocol in lengths.values():
        assert dataclasses.replace(protocol, source=theirs.source, context=None) == theirs
    thoughts = {name: protocol.thinking for name, protocol in PROTOCOLS.items() if protocol.thinking is not None}
    assert thoughts == {"indexmem_pp": False}
    assert PROTOCOLS["indexmem_pp"].question == "unseen"


def test_the_default_set_is_what_there_is_data_for(prepare, tmp_path):
    write(tmp_path, "qasper", [record("qasper", 0)])
    write(tmp_path / "data", "lcc", [record("lcc", 0)])
    prepared = prepare(data_dir=tmp_path)
    assert prepared.tasks == ("qasper", "lcc")
    assert set(prepared.skipped) == set(ENGLISH_AND_CODE) - {"qasper", "lcc"}
    assert "has no LongBench trec data: looked for trec.jsonl" in prepared.skipped["trec"]
    with pytest.raises(UserError, match="has no LongBench trec data"):
        prepare("qasper", "trec", data_dir=tmp_path)


def test_the_data_is_named_by_its_hash(prepare, tmp_path):
    first = prepare("qasper", "qasper_rouge", "qasper_e")
    assert sorted(first.data) == ["longbench/qasper.jsonl", "longbench/qasper_e.jsonl"]
    assert all(value.startswith("sha256:") and len(value) == 71 for value in first.data.values())
    write(tmp_path, "qasper", [record("qasper", 0)])
    assert prepare("qasper", data_dir=tmp_path).data != {k: v for k, v in first.data.items() if "_e" not in k}


def test_no_data_at_all_is_a_sentence(prepare, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"No task of LongBench can run: .* has no LongBench narrativeqa data"):
        prepare(data_dir=tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"LongBench qasper comes from the hub \(zai-org/LongBench\)"):
        prepare("qasper", data_dir=None)


@pytest.mark.parametrize(
    ("task", "change", "sentence"),
    [
        ("qasper", {"context": None}, "record 2 has no field 'context'"),
        ("qasper", {"context": 3}, "record 2: the field 'context' is not a text"),
        ("qasper", {"answers": "yes"}, "record 2: the field 'answers' is not a list of texts"),
        ("qasper", {"answers": []}, "record 2: the field 'answers' is not a list of texts"),
        ("qasper", {"answers": [1]}, "record 2: the field 'answers' is not a list of texts"),
        ("qasper", {"length": "long"}, "record 2: the field 'length' is not a number of words"),
        ("trec", {"all_classes": None}, "record 2 has no field 'all_classes'"),
        ("passage_retrieval_en", {"answers": ["three"]}, "record 2: an answer names no paragraph"),
    ],
)
def test_bad_records_are_sentences(task, change, sentence, prepare, tmp_path):
    write(tmp_path, task, [record(task, 0), {**record(task, 1), **change}])
    with pytest.raises(UserError, match=sentence):
        prepare(task, data_dir=tmp_path)


@pytest.mark.parametrize("written", ['["Ada", "Bo"]', "['Ada', 'Bo']"])
def test_a_list_written_as_text_is_a_list(written, prepare, tmp_path):
    write(tmp_path, "qasper", [{**record("qasper", 0), "answers": written}])
    (doc,) = prepare("qasper", data_dir=tmp_path).metadata["longbench_samples"]["qasper"]
    assert doc["answers"] == ["Ada", "Bo"]


def test_unknown_and_unprepared_tasks(prepare):
    with pytest.raises(UserError, match=r"Unknown task 'qaspr' of LongBench: did you mean qasper"):
        prepare("qaspr")
    with pytest.raises(UserError, match="The number of samples must be at least 1, not 0"):
        prepare("qasper", limit=0)
    with pytest.raises(UserError, match="trec was not prepared"):
        load("trec", version=1)


def test_braces_in_a_record_stay_as_they_are(prepare, tmp_path):
    odd = {**record("repobench-p", 0), "context": "f = {context: {input}}\n", "input": "g = {input}{context}\n"}
    write(tmp_path, "repobench-p", [odd])
    (doc,) = prepare("repobench-p", data_dir=tmp_path).metadata["longbench_samples"]["repobench-p"]
    assert doc["input"].endswith(" \nf = {context: {input}}\ng = {input}{context}\nNext line of code:\n")


def test_importing_the_suite_imports_nothing_heavy():
    script = (
        "import sys; from evictbench.suites.longbench import SUITE; assert len(SUITE.tasks) == 46; "
        "print([m for m in ('torch', 'transformers', 'datasets', 'lm_eval', 'pandas', 'numpy', 'jieba', 'rouge', "
        "'rapidfuzz', 'huggingface_hub') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    assert run.stdout.strip() == "[]"


def test_the_hub_s_archive_is_read(prepare, tmp_path, monkeypatch):
    from zipfile import ZipFile

    import huggingface_hub

    revision = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"
    archive = tmp_path / "snapshots" / revision / "data.zip"
    write(tmp_path, "qasper_e", [record("qasper", 0)])
    archive.parent.mkdir(parents=True)
    with ZipFile(archive, "w") as file:
        file.write(tmp_path / "qasper_e.jsonl", "data/qasper_e.jsonl")

    def download(repo, name, *, repo_type, revision, local_files_only):
        assert (repo, name, repo_type) == ("zai-org/LongBench", "data.zip", "dataset")
        assert revision == archive.parent.name
        return str(archive)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    prepared = prepare("qasper_e", data_dir=None)
    assert prepared.data == prepare("qasper_e", data_dir=tmp_path).data
    assert [doc["answers"] for doc in prepared.metadata["longbench_samples"]["qasper_e"]] == [["Ada wrote it", "Ada"]]
