"""The tasks as the engine loads them: their documents, prompts, limits, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from evictbench.errors import UserError
from evictbench.evaluation import tasks
from evictbench.suites.gsm8k import SUITE
from evictbench.suites.gsm8k.prepare import documents
from evictbench.suites.gsm8k.prompts import examples

SHARED = Path(__file__).parents[4] / "shared" / "data"


def lm_eval_task(records):
    """lm-eval's own gsm8k_cot, on these records."""
    import lm_eval
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    file = Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k-cot.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    config.update(dataset_path="", custom_dataset=lambda **_: {"test": Dataset.from_list(records)})
    return ConfigurableTask(config=config)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_documents(prepare):
    prepared = prepare("gsm8k", "gsm8k_cot8")
    assert prepared.tasks == ("gsm8k", "gsm8k_cot8")
    assert [*prepared.data] == ["test.jsonl"]
    loaded = tasks.load_tasks(SUITE, prepared)
    for name, task in loaded.items():
        docs = list(task.eval_docs)
        assert [doc["answer"] for doc in docs] == ["5", "2000", "-3"]
        assert [doc["index"] for doc in docs] == [0, 1, 2]
        assert tasks.version_of(task) == "1.1"
        assert tasks.score(task, 1, "The answer is 2,000.").score == 1.0, name
        assert list(task.aggregation()) == ["score", "flexible"]


def test_zero_shot_prompt(prepare):
    task = tasks.load_tasks(SUITE, prepare())["gsm8k"]
    assert tasks.render(task, task.eval_docs[0], None) == (
        "A tram has 12 seats and 7 are taken.\nHow many are free?\n"
        "Please reason step by step, and put your final answer within \\boxed{}."
    )
    assert task.config.generation_kwargs == {"max_gen_toks": 512, "do_sample": False, "until": []}
    assert "chat" not in task.config.metadata


def test_eight_shot_prompt_is_that_of_lm_eval(prepare, data_dir):
    ours = tasks.load_tasks(SUITE, prepare("gsm8k_cot8"))["gsm8k_cot8"]
    records = [json.loads(line) for line in (data_dir / "test.jsonl").read_text().splitlines()]
    theirs = lm_eval_task(records)
    for index, record in enumerate(records):
        prompt = tasks.render(ours, ours.eval_docs[index], None)
        assert prompt == theirs.fewshot_context(record, num_fewshot=8)
        assert "\\n" not in prompt
    assert ours.config.generation_kwargs["until"] == theirs.config.generation_kwargs["until"]
    assert ours.config.generation_kwargs["max_gen_toks"] == 256
    assert ours.config.metadata["chat"] is False


def test_examples_snapshot():
    assert examples().count("Q: ") == examples().count("The answer is ") == 8
    assert (len(examples()), digest(examples())) == EXAMPLES


EXAMPLES = (2141, "3d55795c084e26f6")


@pytest.mark.skipif(not SHARED.is_dir(), reason="GSM8K itself is not part of the project")
def test_prompts_of_the_real_problems(prepare):
    prepared = prepare("gsm8k", "gsm8k_cot8", data_dir=SHARED)
    assert prepared.data == {"gsm8k/test.jsonl": CONTENT}
    loaded = tasks.load_tasks(SUITE, prepared)
    snapshot = {}
    for name, task in loaded.items():
        assert len(task.eval_docs) == 1319
        texts = [tasks.render(task, task.eval_docs[index], None) for index in (0, 1318)]
        snapshot[name] = [(len(text), digest(text)) for text in texts]
        assert not any("\\n" in text for text in texts)
    assert snapshot == REAL
    theirs = lm_eval_task([json.loads(line) for line in (SHARED / "gsm8k" / "test.jsonl").open(encoding="utf-8")][:20])
    ours = loaded["gsm8k_cot8"]
    for index in range(20):
        assert ours.eval_docs[index]["input"] == theirs.fewshot_context(theirs.eval_docs[index], num_fewshot=8)


CONTENT = "sha256:b6c9d9547ec974d3c064a2f101ebf67e74257536d8c5e22a9758f2893a9e03a4"
REAL = {
    "gsm8k": [(351, "bd7186ee500f8fcc"), (254, "1841d1754cc89056")],
    "gsm8k_cot8": [(2427, "901fead9abd2535b"), (2330, "5b060fe1533ea376")],
}


def test_every_gold_of_the_real_problems_is_graded_right(prepare):
    if not SHARED.is_dir():
        pytest.skip("GSM8K itself is not part of the project")
    records = [json.loads(line) for line in (SHARED / "gsm8k" / "test.jsonl").open(encoding="utf-8")]
    prepared = prepare("gsm8k", "gsm8k_cot8", data_dir=SHARED)
    for name, task in tasks.load_tasks(SUITE, prepared).items():
        for index, record in enumerate(records):
            gold = record["answer"].rpartition("#### ")[2]
            answer = f"\\boxed{{{gold}}}" if name == "gsm8k" else f" ... The answer is ${gold}.\n\n"
            assert task.process_results(task.eval_docs[index], [answer])["score"] == 1.0
            assert task.process_results(task.eval_docs[index], [record["answer"]])["score"] == 1.0


def test_bad_data_is_a_sentence(prepare, tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text('{"question": "How many?", "answer": "None at all."}\n')
    with pytest.raises(UserError, match=r"test\.jsonl: record 1: the answer does not end with #### and a number\."):
        prepare()
    file.write_text('{"question": "How many?"}\n')
    with pytest.raises(UserError, match=r"test\.jsonl: record 1 has no field 'answer'\."):
        prepare()
    file.write_text("\n")
    with pytest.raises(UserError, match=r"test\.jsonl holds no records\."):
        prepare()
    file.unlink()
    with pytest.raises(UserError, match=r"has no GSM8K data: looked for test\.jsonl or .*, there and in gsm8k/\."):
        prepare()


def test_unknown_tasks_and_unprepared_ones_say_so(prepare):
    with pytest.raises(UserError, match=r"Unknown task 'gsm9k' of GSM8K: did you mean gsm8k"):
        prepare("gsm9k")
    with pytest.raises(UserError, match="gsm8k was not prepared"):
        documents("gsm8k", version=1)


def test_protocols_name_tasks_that_there_are():
    assert set(SUITE.protocols) == {"default", "cot8", "distillcache"}
    for protocol in SUITE.protocols.values():
        assert set(protocol.tasks) <= set(SUITE.tasks)
        assert protocol.sampling.temperature == 0
    assert SUITE.protocols["distillcache"].max_new_tokens == 512
