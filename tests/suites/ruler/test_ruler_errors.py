"""Bad input: one sentence that says what to put right, before anything is generated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evictbench.errors import UserError
from evictbench.suites.ruler import hub
from evictbench.suites.ruler.tasks import TASKS


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch):
    monkeypatch.setattr(hub, "_unreachable", lambda: "it cannot be reached")


def refused(prepare, *tasks: str, **request) -> str:
    with pytest.raises(UserError) as error:
        prepare(*tasks, **request)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))
    return sentence


def test_unknown_task_names_near_matches(prepare):
    assert refused(prepare, "niah_singel_1").startswith(
        "Unknown task 'niah_singel_1' of RULER: did you mean niah_single_1"
    )
    everything = refused(prepare, "vt", "poetry")
    assert all(name in everything for name in TASKS)


@pytest.mark.parametrize("name", [name for name in TASKS if not name.startswith("qa")])
def test_the_least_length_is_refused_below_and_runs_at_it(prepare, name):
    sentence = refused(prepare, name, context=60)
    least = int(sentence.split("at least ")[1].split()[0])
    assert sentence == f"{name} needs a context of at least {least} tokens with this tokenizer, not 60."
    # asked for exactly that, whatever is drawn is made to fit
    samples = prepare(name, context=least, limit=40).metadata["ruler_samples"][name]
    room = least - TASKS[name].answer_tokens
    assert all(doc["prompt_tokens"] <= room for doc in samples)
    assert f"not {least - 1}." in refused(prepare, name, context=least - 1)


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_questions_whose_documents_do_not_fit_are_passed_over(prepare, name):
    least = int(refused(prepare, name, context=60).split("at least ")[1].split()[0])
    docs = list(prepare(name, context=least, limit=1000).metadata["ruler_samples"][name])
    everything = list(prepare(name, context=2048, limit=1000).metadata["ruler_samples"][name])
    assert 0.85 * len(everything) <= len(docs) <= len(everything)
    asked = [doc["outputs"] for doc in everything]
    places = [asked.index(doc["outputs"]) for doc in docs]
    assert places == sorted(places)


def test_a_context_too_short_for_every_task(prepare):
    sentence = refused(prepare, context=60)
    assert sentence.startswith("No task of RULER can run: niah_single_1 needs a context of at least ")


@pytest.mark.parametrize(("name", "value"), [("context", -5), ("limit", -1)])
def test_counts_below_one(prepare, name, value):
    assert refused(prepare, "vt", **{name: value}).endswith(f"must be at least 1, not {value}.")


def test_no_data_skips_the_questions_or_refuses_them_by_name(prepare, tmp_path):
    for data_dir in (None, tmp_path):
        suite = prepare(context=2048, data_dir=data_dir)
        assert set(suite.tasks) == set(TASKS) - {"qa_1", "qa_2"}
        assert suite.skipped["qa_1"].startswith("The squad data is neither in ")
        assert suite.skipped["qa_2"].endswith("nor to be had from the hub: it cannot be reached.")
        assert "squad" not in suite.data
        assert refused(prepare, "qa_1", data_dir=data_dir) == suite.skipped["qa_1"]


def test_missing_data_folder(prepare, tmp_path):
    assert refused(prepare, "vt", data_dir=tmp_path / "none").endswith("none does not exist.")


def test_too_few_documents_for_the_context(prepare):
    sentence = "qa_1: the documents of invented.json cannot fill a context of 65536."
    assert refused(prepare, "qa_1", context=65_536) == sentence


PARAGRAPH = {"context": "text", "qas": [{"question": "why?", "answers": [{"text": "so"}]}]}
SQUAD = [
    ([], "is not an object with the field data."),
    ({"version": 1}, "has no field data."),
    ({"data": {}}, "the field data is dict, not list."),
    ({"data": [{"title": "a"}]}, "data[0] has no field paragraphs."),
    ({"data": [{"paragraphs": [{"qas": []}]}]}, "data[0].paragraphs[0] has no field context."),
    (
        {"data": [{"paragraphs": [PARAGRAPH, {"context": 1}]}]},
        "data[0].paragraphs[1]: the field context is int, not str.",
    ),
    ({"data": [{"paragraphs": [{"context": "c"}]}]}, "data[0].paragraphs[0] has no field qas."),
    ({"data": [{"paragraphs": [{**PARAGRAPH, "qas": [{}]}]}]}, "data[0].paragraphs[0].qas[0] has no field question."),
    (
        {"data": [{"paragraphs": [{**PARAGRAPH, "qas": [{"question": "?", "answers": ["a"]}]}]}]},
        "data[0].paragraphs[0].qas[0].answers[0] is not an object with the field text.",
    ),
    ({"data": []}, "holds no squad question that has an answer."),
]
RECORD = {"question": "why?", "answer": "so", "context": [["title", ["one.", " two."]]]}
HOTPOTQA = [
    ({}, "expected a list of questions, found dict."),
    ([1], "[0] is not an object with the field question."),
    ([RECORD, {**RECORD, "answer": 3}], "[1]: the field answer is int, not str."),
    ([{"question": "why?", "answer": "so"}], "[0] has no field context."),
    ([{**RECORD, "context": [["title", "text"]]}], "[0]: the field context[0] is not a title and a list of sentences."),
]


@pytest.mark.parametrize(("content", "ending"), SQUAD)
def test_malformed_squad_names_file_and_field(prepare, tmp_path, content, ending):
    assert malformed(prepare, tmp_path, "squad", content).endswith(ending)


@pytest.mark.parametrize(("content", "ending"), HOTPOTQA)
def test_malformed_hotpotqa_names_file_and_field(prepare, tmp_path, content, ending):
    assert malformed(prepare, tmp_path, "hotpotqa", content).endswith(ending)


def malformed(prepare, folder: Path, dataset: str, content: object) -> str:
    (folder / dataset).mkdir()
    file = folder / dataset / "broken.json"
    file.write_text(json.dumps(content))
    # refused even where the task was not asked for by name: the file was given to be used
    sentence = refused(prepare, data_dir=folder, context=512)
    assert "broken.json" in sentence
    return sentence


def test_a_file_that_is_not_json(prepare, tmp_path):
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "a.json").write_text("{")
    assert "a.json is not valid JSON: " in refused(prepare, "qa_1", data_dir=tmp_path)


def test_chat_without_a_template(prepare, make_tokenizer):
    tokenizer = make_tokenizer(300)
    tokenizer.chat_template = None
    assert refused(prepare, "vt", tokenizer=tokenizer, chat=True).startswith("The tokenizer has no chat template")


def test_a_tokenizer_without_words(prepare):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    assert refused(prepare, "vt", tokenizer=empty).startswith("The tokenizer encodes text to no tokens")
