"""Worked examples drawn from the train set: which, in what form, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from evictbench.errors import UserError
from evictbench.evaluation import tasks
from evictbench.suites.gsm8k import SUITE, exemplars

SHARED = Path(__file__).parents[4] / "shared" / "data"
NAME = "gsm8k_cot8_train"
SOLVED = [
    {
        "question": f"A shelf holds {n} rows of {n + 1} jars.\nHow many jars? ",
        "answer": f"It holds {n}*{n + 1} = <<{n}*{n + 1}={n * (n + 1)}>>{n * (n + 1)} jars.\n\nThat is all.\n"
        f"#### {n:,}",
    }
    for n in range(1000, 1012)
]


@pytest.fixture
def write(data_dir):
    """`write(records)` puts them beside the problems, as the train set."""

    def write(records):
        (data_dir / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    return write


def test_eight_solved_problems_of_the_train_set_in_the_form_of_wei_et_al(prepare, write):
    write(SOLVED)
    prepared = prepare(NAME)
    task = tasks.load_tasks(SUITE, prepared)[NAME]
    prompt = tasks.render(task, task.task_docs[0], None)
    *examples, question = prompt.split("\n\n")
    drawn = random.Random(0).sample(range(12), 8)
    assert examples == [
        f"Q: A shelf holds {n} rows of {n + 1} jars.\nHow many jars?\n"
        f"A: It holds {n}*{n + 1} = {n * (n + 1)} jars.\nThat is all.\nThe answer is {n:,}."
        for n in (1000 + row for row in drawn)
    ]
    assert question == "Q: A tram has 12 seats and 7 are taken.\nHow many are free?\nA:"
    assert prepared.data["examples"] == f"records {', '.join(str(row + 1) for row in drawn)}, drawn with seed 0"
    assert prepared.data["train.jsonl"].startswith("sha256:")
    assert prepared.warnings[-1] == (
        "train.jsonl has 12 problems, and GSM8K's train set 7473: the worked examples are not those that are drawn "
        "from the whole."
    )
    assert tasks.version_of(task) == "1.0"
    assert task.config.metadata["chat"] is False
    assert task.config.generation_kwargs["max_gen_toks"] == 512
    assert tasks.score(task, 0, " 12 - 7 = 5.\nThe answer is 5.").score == 1.0


def test_the_examples_are_the_same_whatever_the_seed_of_the_run(prepare, write, data_dir):
    from evictbench.suite import SuiteRequest

    write(SOLVED)
    asked = [
        SuiteRequest(tokenizer=None, chat=False, tasks=(NAME,), data_dir=data_dir, seed=seed, limit=seed + 1)
        for seed in (0, 1)
    ]
    first, second = (SUITE.prepare(request) for request in asked)
    assert first.data == second.data
    assert first.metadata["gsm8k_documents"][NAME][0] == second.metadata["gsm8k_documents"][NAME][0]


def test_the_rows_that_are_drawn_from_the_whole_set():
    """Written down, so that a change of the draw cannot go unnoticed."""
    assert (exemplars.SHOTS, exemplars.SEED, exemplars.TRAIN.documents) == (8, 0, 7473)
    assert random.Random(0).sample(range(7473), 8) == [6917, 3155, 6209, 7292, 3445, 331, 2121, 4188]


def test_no_example_is_among_the_problems_that_bundled_weights_were_trained_on():
    """Those are the first of a shuffled order, as many as fill the blocks."""
    from training.texts import SEED, SETS, TOKENS

    order = list(range(7473))
    random.Random(SEED).shuffle(order)
    shortest = 60  # tokens of a solved problem; the mean is near 145
    most = max(counts.solved for counts in SETS.values()) * TOKENS // shortest
    assert not {6917, 3155, 6209, 7292, 3445, 331, 2121, 4188} & {*order[:most]}


@pytest.mark.skipif(not SHARED.is_dir(), reason="GSM8K itself is not part of the project")
def test_the_real_examples():
    drawn = exemplars.draw(SHARED)
    assert drawn.data["examples"] == "records 6918, 3156, 6210, 7293, 3446, 332, 2122, 4189, drawn with seed 0"
    assert drawn.warnings == ()
    assert drawn.text.count("Q: ") == drawn.text.count("\nThe answer is ") == drawn.text.count("\n\n") == 8
    assert "<<" not in drawn.text
    assert "####" not in drawn.text


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        (SOLVED[:7], r"train\.jsonl has 7 problems, and 8 worked examples are drawn from it\."),
        ([{"question": "1?", "answer": "one"}] * 8, r"record \d: the answer is no solution that ends with #### and a"),
        ([{"question": "1?", "answer": "#### 1"}] * 8, r"record \d: the answer is no solution that ends with ####"),
        ([{"question": "1?"}] * 8, r"train\.jsonl: record 1 has no field 'answer'\."),
    ],
)
def test_a_train_set_that_gives_no_examples_is_a_sentence(prepare, write, records, sentence):
    write(records)
    with pytest.raises(UserError, match=sentence):
        prepare(NAME)


def test_only_the_task_that_needs_the_train_set_asks_for_it(prepare):
    assert prepare("gsm8k", "gsm8k_cot8").tasks == ("gsm8k", "gsm8k_cot8")
    with pytest.raises(UserError, match=r"has no GSM8K train data: looked for train\.jsonl or .*, there and in gsm8k/"):
        prepare(NAME)


def test_the_examples_of_lm_eval_and_of_distillcache_are_two_tasks():
    assert SUITE.protocols["cot8"].tasks == ("gsm8k_cot8",)
    assert SUITE.protocols["distillcache"].tasks == (NAME,)
