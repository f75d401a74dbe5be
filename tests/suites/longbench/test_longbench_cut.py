"""Prompts that are too long are cut in the middle, fit with template and answer, and keep their border."""

from __future__ import annotations

import pytest
from longbench_records import record, write
from transformers import PreTrainedTokenizerFast

from evictbench.errors import UserError
from evictbench.evaluation import tasks
from evictbench.suites.longbench import SUITE
from evictbench.suites.longbench.cut import Cutter, Text, cut
from evictbench.suites.longbench.tasks import OFFICIAL, TASKS


@pytest.fixture(scope="module")
def words():
    """A tokenizer of whole words, w0 to w99."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    raw = Tokenizer(models.WordLevel({**{f"w{i}": i for i in range(100)}, "[UNK]": 100}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")


FIFTY = " ".join(f"w{i}" for i in range(50))


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("limit", "half"), [(20, 10), (21, 10), (49, 24), (2, 1)])
def test_first_half_and_last_half(words, limit, half):
    shorter = cut(Text(FIFTY, FIFTY.index(" w45")), limit, words)
    assert shorter.cut
    assert ids(words, shorter.whole) == [*range(half), *range(50 - half, 50)]


@pytest.mark.parametrize(
    ("border", "context", "question"),
    [
        (" w45", [*range(10), *range(40, 45)], [*range(45, 50)]),  # in what is kept of the end
        (" w40", [*range(10)], [*range(40, 50)]),  # where the halves meet
        (" w25", [*range(10)], [*range(40, 50)]),  # cut away: where the halves meet
        (" w4 ", [*range(4)], [*range(4, 10), *range(40, 50)]),  # in what is kept of the beginning
    ],
)
def test_the_context_still_ends_at_the_border(words, border, context, question):
    shorter = cut(Text(FIFTY, FIFTY.index(border)), 20, words)
    assert ids(words, shorter.whole[: shorter.border]) == context
    assert ids(words, shorter.whole[shorter.border :]) == question


def test_a_tokenizer_without_offsets_decodes(words):
    class Slow:
        is_fast = False

        def __call__(self, texts, **options):
            return words(texts, **options)

        def decode(self, token_ids):
            return words.decode(token_ids)

    shorter = cut(Text(FIFTY, FIFTY.index(" w45")), 20, Slow())
    assert shorter.whole == " ".join(f"w{i}" for i in range(10)) + " ".join(f"w{i}" for i in range(40, 50))
    assert shorter.whole[shorter.border :] == " w45 w46 w47 w48 w49"


def test_it_is_what_decoding_gives_but_characters_stay_whole(tokenizer):
    english = "The crew of the Marlin ate the bread, and the log says so. " * 9
    for limit in range(40, 60):
        both = ids(tokenizer, english)
        decoded = tokenizer.decode(both[: limit // 2]) + tokenizer.decode(both[-(limit // 2) :])
        assert cut(Text(english, 10), limit, tokenizer).whole == decoded
    chinese = "第三天，他在日记里写下了数字，然后去山上看日出。" * 9
    for limit in range(40, 60):
        shorter = cut(Text(chinese, 10), limit, tokenizer).whole
        assert "\ufffd" not in shorter
        assert set(shorter) <= set(chinese)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", OFFICIAL)
def test_whole_prompts_fit_and_fill(task, chat, prepare, tokenizer, longbench_dir, tmp_path):
    write(tmp_path, task, [record(task, 0, lines=2), record(task, 1, lines=60), record(task, 2, lines=61)])
    window = 420 + TASKS[task].answer_tokens + len(ids(tokenizer, prepare_template(task)))
    prepared = prepare(task, chat=chat, window=window, data_dir=tmp_path)
    loaded = tasks.load_tasks(SUITE, prepared)[task]
    docs = list(prepared.metadata["longbench_samples"][task])
    made = list(tasks.prompts(loaded, tokenizer, chat=chat, context_field="context", limit=None))
    room = window - TASKS[task].answer_tokens
    lengths = [len(prompt.ids) for prompt in made]
    assert [doc["cut"] for doc in docs] == [False, True, True]
    assert lengths[0] < room - 10
    # the tokens of a switched-off thought are kept free; halves may meet in fewer tokens than they had
    assert all(room - 24 <= tokens <= room for tokens in lengths[1:]), (lengths, room)
    whole = prepare(task, chat=chat, data_dir=tmp_path).metadata["longbench_samples"][task]
    for doc, uncut in zip(docs, whole, strict=True):
        question = uncut["input"][len(uncut["context"]) :]
        assert doc["input"][len(doc["context"]) :] == question
        assert doc["input"].startswith(doc["context"])
        assert doc["input"][:50] == uncut["input"][:50]
        assert loaded.process_results(doc, [doc["answers"][0]])["cut"] == float(doc["cut"])


def prepare_template(task: str) -> str:
    from evictbench.suites.longbench.templates import TEMPLATES

    return TEMPLATES[TASKS[task].template]


def test_without_a_window_nothing_is_cut(prepare):
    samples = prepare("qasper", window=None).metadata["longbench_samples"]["qasper"]
    assert not any(doc["cut"] for doc in samples)


def test_the_context_option_and_a_fixed_answer_count(prepare, tokenizer):
    def lengths(**changes):
        samples = prepare("qasper", chat=False, **changes).metadata["longbench_samples"]["qasper"]
        return [len(tokenizer(doc["input"])["input_ids"]) for doc in samples]

    whole = min(lengths())
    assert max(lengths(window=4096, context=whole)) <= whole - 128
    assert max(lengths(window=whole, context=4096)) <= whole - 128
    assert max(lengths(window=whole, max_new_tokens=200)) <= whole - 200


def test_too_little_room_is_a_sentence(prepare):
    samples = prepare("gov_report", window=512 + 40).metadata["longbench_samples"]["gov_report"]
    with pytest.raises(UserError, match=r"cannot be cut to 40 tokens, chat template included"):
        samples[0]


def test_the_cut_does_not_depend_on_the_limit_or_the_order(prepare):
    many = prepare("qasper", window=500).metadata["longbench_samples"]["qasper"]
    few = prepare("qasper", window=500, limit=2).metadata["longbench_samples"]["qasper"]
    assert len(few) == 2
    assert [many[2], many[1], many[0]][1:] == [few[1], few[0]]
    assert many[-1] == many[2]
    assert many[0:2] == list(few)


def test_the_longest_form_of_the_template_is_kept_free(tokenizer):
    template = Cutter(tokenizer, chat=True, room=200)
    text = "The crew of the Marlin ate the bread. " * 60
    shorter = template.fit([Text(text, 10)])[0].whole
    turn = [{"role": "user", "content": shorter}]
    for options in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        form = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, **options)
        assert len(ids(tokenizer, form)) <= 200
