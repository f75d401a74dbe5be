"""`--suite lm-eval:...`: lm-eval's tasks through the ordinary run, graded by themselves, in a folder like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.conftest import QUESTIONS
from lm_eval import simple_evaluate

from evictbench.errors import UserError
from evictbench.evaluation.run import run
from evictbench.evaluation.settings import RunSettings
from evictbench.harness.model import EvictBenchLM
from evictbench.harness.suite import suite_for
from evictbench.models.load import load_tokenizer, resolve
from evictbench.store import run_folder
from evictbench.suite import SuiteRequest


class Quiet:
    """Watches a run and says nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def lines(folder: Path, task: Path, out: Path, **settings: Any) -> tuple[list[dict[str, Any]], Any]:
    given = RunSettings(
        **{
            "suite": f"lm-eval:{task}",
            "model": str(folder),
            "policy": "tova",
            "budget": "16",
            "device": "cpu",
            "out": out,
            "batch_size": 3,
            **settings,
        }
    )
    outcome = run(given, Quiet())
    found = run_folder.read_samples(outcome.plan.folder)
    return sorted(found.values(), key=lambda line: line["doc_id"]), outcome


def reference(folder: Path, manager: Any, task: str, **arguments: Any) -> list[dict[str, Any]]:
    """The same through lm-eval's own evaluator and our model."""
    model = EvictBenchLM(pretrained=str(folder), device="cpu", **arguments)
    found = simple_evaluate(model=model, tasks=[task], task_manager=manager, bootstrap_iters=0)
    assert found is not None
    return sorted(found["samples"][task], key=lambda line: line["doc_id"])


def test_generation_task(folder: Path, task_folder: Path, manager: Any, tmp_path: Path) -> None:
    found, outcome = lines(folder, task_folder / "tiny_gen.yaml", tmp_path)
    expected = reference(folder, manager, "tiny_gen", policy="tova", budget=16)
    assert [line["text"] for line in found] == [line["resps"][0][0] for line in expected]
    assert [line["score"] for line in found] == [line["exact_match"] for line in expected]
    assert outcome.plan.fingerprint["tasks"] == {"tiny_gen": "1.5"}
    assert {line["token_limit"] for line in found} == {12}
    assert outcome.plan.folder.parent.parent.name == "lm-eval-tiny_gen"
    assert any(value.startswith("sha256:") for value in outcome.plan.fingerprint["data"].values())


def test_multiple_choice_task(folder: Path, task_folder: Path, manager: Any, tmp_path: Path) -> None:
    found, outcome = lines(folder, task_folder / "tiny_choice.yaml", tmp_path)
    expected = reference(folder, manager, "tiny_choice", policy="tova", budget=16)
    for line, own in zip(found, expected, strict=True):
        assert line["score"] == line["metrics"]["acc"] == own["acc"]
        assert line["metrics"]["acc_norm"] == own["acc_norm"]
        scores = [pair[0][0] for pair in own["resps"]]
        doc = own["doc"]
        assert line["text"] == (doc["first"] if scores[0] > scores[1] else doc["second"])
        assert line["occupancy_max"] == 16
    assert len({line["doc_id"] for line in found}) == outcome.summary["mean"]["samples"] == 4


@pytest.mark.parametrize("task", ["tiny_gen", "tiny_choice"])
def test_chat_and_resume(folder: Path, task_folder: Path, tmp_path: Path, task: str) -> None:
    """The chat template where it is asked for and once; a larger limit extends the same folder."""
    plain, first = lines(folder, task_folder / f"{task}.yaml", tmp_path, limit=2)
    more, second = lines(folder, task_folder / f"{task}.yaml", tmp_path, limit=4)
    assert first.plan.folder == second.plan.folder
    assert more[:2] == plain
    chat, third = lines(folder, task_folder / f"{task}.yaml", tmp_path, limit=2, chat="on")
    assert third.plan.folder != first.plan.folder
    text = third.plan.tokenizer.decode(list(third.plan.prompts[0].prompt.ids))
    assert text.count("<|im_start|>assistant") == 1
    assert "<|im_start|>" not in first.plan.tokenizer.decode(list(first.plan.prompts[0].prompt.ids))
    assert chat[0]["prompt_tokens"] > plain[0]["prompt_tokens"]


def test_percent_budgets_and_the_guard(folder: Path, task_folder: Path, tmp_path: Path) -> None:
    found, _ = lines(folder, task_folder / "tiny_choice.yaml", tmp_path, budget="50%")
    assert all(32 <= line["occupancy_max"] <= line["prompt_tokens"] for line in found)


def test_names_and_kinds_that_cannot_be(task_folder: Path, tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match="There is no task file"):
        suite_for(str(tmp_path / "none.yaml"))
    with pytest.raises(UserError, match="fidelity"):
        suite_for(str(task_folder / "tiny_rolling.yaml"))
    beams = tmp_path / "beams.yaml"
    beams.write_text("task: beams\noutput_type: generate_until\ngeneration_kwargs:\n  num_beams: 4\n")
    with pytest.raises(UserError, match="num_beams=4"):
        suite_for(str(beams))
    bleu = tmp_path / "bleu.yaml"
    text = (task_folder / "tiny_gen.yaml").read_text().replace("tiny_gen", "bleu").replace("exact_match", "bleu")
    bleu.write_text(text.replace("aggregation: mean", "aggregation: bleu"))
    with pytest.raises(UserError, match="no metric that is a mean"):
        lines(folder, bleu, tmp_path / "out")
    gone = tmp_path / "gone.yaml"
    gone.write_text((task_folder / "tiny_gen.yaml").read_text().replace("data.jsonl", "gone.jsonl"))
    with pytest.raises(UserError, match="cannot be loaded"):
        lines(folder, gone, tmp_path / "out")


def test_empty_contexts_are_refused(task_folder: Path, tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "info.yaml"
    text = (task_folder / "tiny_choice.yaml").read_text().replace("tiny_choice", "info")
    path.write_text(text.replace("metric: acc_norm", "metric: acc_mutual_info"))
    with pytest.raises(UserError, match="empty context"):
        lines(folder, path, tmp_path / "out")


def test_lm_evals_own_names() -> None:
    """Its index takes a while to read, so one test asks it all: near matches, a task, a group, a tag."""
    with pytest.raises(UserError, match="did you mean gsm8k_cot"):
        suite_for("gsm8k_cott")
    with pytest.raises(UserError, match="lm_eval ls tasks"):
        suite_for("qqqqqqqqqq")
    cot = suite_for("gsm8k_cot")
    assert cot.tasks == ("gsm8k_cot",)
    assert cot.protocols["default"].chat is False
    made = "".join(path.read_text() for path in cot.folder.glob("*.yaml"))
    assert "max_gen_toks: 256" in made
    assert json.dumps(["Q:", "</s>", "<|im_end|>"]) in made
    assert getattr(cot, "generator", None) is None
    assert len(suite_for("bbh_cot_fewshot").tasks) == 27
    mmlu = suite_for("mmlu")
    assert len(mmlu.tasks) == 57
    assert getattr(mmlu, "generator", None) is not None
    assert set(suite_for("ai2_arc").tasks) == {"arc_easy", "arc_challenge"}
    with pytest.raises(UserError, match="wikitext"):
        suite_for("wikitext")


def test_choices_of_one_token_feel_a_bounded_prefill_only(folder: Path, task_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "single.yaml"
    text = (task_folder / "tiny_choice.yaml").read_text().replace("tiny_choice", "single")
    path.write_text(text.replace("{{[first, second]}}", "{{[' A', ' B']}}"))
    full, dense, bounded = (
        reference_scores(folder, path, **arguments)
        for arguments in (
            {"policy": "full"},
            {"policy": "tova", "budget": 16},
            {"policy": "tova", "budget": 16, "prefill": "bounded", "chunk": 16},
        )
    )
    assert dense == pytest.approx(full, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(bounded, full, strict=True)) > 1e-3


def reference_scores(folder: Path, path: Path, **arguments: Any) -> list[float]:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(path.parent), include_defaults=False)
    found = reference(folder, manager, path.stem, **arguments)
    return [pair[0][0] for line in found for pair in line["resps"]]


@pytest.mark.parametrize("task", ["tiny_gen", "tiny_choice"])
def test_a_description_is_in_the_prompt_whatever_the_template_has(
    folder: Path, task_folder: Path, tmp_path: Path, task: str
) -> None:
    """As the system's message, or before the user's text; the prompt of a template that loses a text is refused."""
    path = tmp_path / f"{task}.yaml"
    path.write_text((task_folder / path.name).read_text() + 'description: "Answer in a word."\n')
    turns = "{% for m in messages%}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + turns
    drops = turns.replace("messages%}", "messages if m['role'] != 'system' %}")
    for template, moved in ((turns, False), (refuses, True), (drops, True)):
        tokenizer = load_tokenizer(resolve(str(folder)))
        tokenizer.chat_template = template
        prepared = suite_for(str(path)).prepare(SuiteRequest(tokenizer, chat=True))
        (documents,) = prepared.metadata["lm_eval_documents"].values()
        for doc, (question, *_) in zip(documents, QUESTIONS, strict=True):
            asked = doc["input"].rpartition("<user>")[2]
            assert question in asked
            assert asked.startswith("Answer in a word.") == moved
            assert doc["input"].startswith("<user>" if moved else "<system>Answer in a word.")
        assert (prepared.data.get(f"{task}, description") is not None) == moved
    tokenizer.chat_template = turns.replace("m['content']", "m['content'].replace('note', '')")
    with pytest.raises(UserError, match=f"The chat template leaves out .* of the user .lm-eval's {task}, sample 0"):
        suite_for(str(path)).prepare(SuiteRequest(tokenizer, chat=True))
