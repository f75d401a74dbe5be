"""Every task at several lengths: fits, fills, repeats itself, and does not depend on how many are asked for."""

from __future__ import annotations

import pytest

from evictbench.suites.ruler import fit
from evictbench.suites.ruler.tasks import TASKS

# The longest unit that may be left out at the end of a haystack, in tokens of the small tokenizer.
LONGEST_UNIT = 130

FITS = {
    512: {"niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_2", "fwe", "qa_1"},
    1024: set(TASKS) - {"qa_2"},
    4096: set(TASKS),
}


@pytest.fixture(scope="module", params=[512, 1024, 4096])
def prepared(request, prepare):
    return request.param, prepare(context=request.param, limit=6)


def test_the_default_set_is_what_fits_and_the_rest_says_why(prepared):
    context, suite = prepared
    assert FITS[context] <= set(suite.tasks)
    assert set(suite.tasks) | set(suite.skipped) == set(TASKS)
    assert not set(suite.tasks) & set(suite.skipped)
    for name, sentence in suite.skipped.items():
        assert sentence.startswith(f"{name} needs a context of at least ")
        assert sentence.endswith(f"with this tokenizer, not {context}.")


def test_prompts_fit_and_fill(prepared, tokenizer):
    context, suite = prepared
    for name, samples in suite.metadata["ruler_samples"].items():
        assert len(samples) == 6
        for doc in samples:
            exact = len(tokenizer(f"{doc['input']} {doc['gen_prefix']}")["input_ids"])
            assert doc["prompt_tokens"] == exact, name
            free = context - TASKS[name].answer_tokens - exact
            assert 0 <= free <= max(LONGEST_UNIT, context // 40), (name, doc["index"], free)


def test_the_context_ends_where_the_question_begins(prepared):
    _, suite = prepared
    first_words = {
        "niah": ("What is the special magic ", "What are all the special magic "),
        "vt": ("Question: Find all variables that are assigned the value ",),
        "cwe": ("Question: What are the 10 most common words",),
        "fwe": ("Question: Do not provide any explanation.",),
        "qa": ("Answer the question based on the given documents.",),
    }
    for name, samples in suite.metadata["ruler_samples"].items():
        for doc in samples:
            assert doc["input"].startswith(doc["context"])
            question = doc["input"][len(doc["context"]) :]
            assert question.startswith(first_words[name.split("_")[0]]), name
            assert doc["context"].endswith("\n")
            assert doc["gen_prefix"] not in doc["input"][len(doc["context"]) :]


def test_the_same_request_gives_the_same_documents(prepare):
    first, second = (prepare(context=1024).metadata["ruler_samples"] for _ in range(2))
    for name in first:
        assert list(first[name]) == list(second[name])


def test_a_larger_limit_extends_and_order_does_not_matter(prepare):
    few = prepare(context=1024, limit=3).metadata["ruler_samples"]
    many = prepare(context=1024, limit=70).metadata["ruler_samples"]
    for name in few:
        if name.startswith("qa"):
            assert len(many[name]) >= 60
        else:
            assert len(many[name]) == 70
        last = many[name][len(many[name]) - 1]
        assert last["index"] == len(many[name]) - 1
        assert [many[name][i] for i in (2, 0, 1)] == [few[name][i] for i in (2, 0, 1)]


def test_a_task_alone_has_the_documents_it_has_among_others(prepare, documents):
    together = prepare(context=1024).metadata["ruler_samples"]
    for name in ("niah_multikey_1", "cwe", "qa_1"):
        assert documents(name) == list(together[name])


def test_a_sample_hides_the_same_at_every_length(documents):
    for name in TASKS:
        answers = [[doc["outputs"] for doc in documents(name, context=context)] for context in (3000, 4200)]
        assert answers[0] == answers[1], name


def test_seeds_and_tasks_differ(documents):
    answers = {
        (name, seed): [tuple(doc["outputs"]) for doc in documents(name, seed=seed)]
        for name in ("niah_single_1", "niah_single_2", "vt", "cwe", "fwe")
        for seed in (0, 1)
    }
    everything = [one for some in answers.values() for one in some]
    assert len(set(everything)) == len(everything)


def test_samples_read_as_a_sequence(prepare):
    samples = prepare("fwe", limit=40).metadata["ruler_samples"]["fwe"]
    assert samples[-1] == samples[39]
    assert [doc["index"] for doc in samples[5:8]] == [5, 6, 7]
    assert list(samples.features) == list(samples[0])
    with pytest.raises(IndexError):
        samples[40]


@pytest.mark.parametrize("bos", [False, True])
def test_chat_prompts_count_the_template_whose_bos_is_its_own(prepare, make_tokenizer, bos):
    tokenizer = make_tokenizer(1500, bos)
    suite = prepare(context=2048, limit=3, tokenizer=tokenizer, chat=True)
    for name, samples in suite.metadata["ruler_samples"].items():
        for doc in samples:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": doc["input"]}], tokenize=False, add_generation_prompt=True
            )
            exact = len(tokenizer(text + doc["gen_prefix"], add_special_tokens=False)["input_ids"])
            assert exact == doc["prompt_tokens"], name
            assert exact + TASKS[name].answer_tokens <= 2048


def test_a_template_that_can_think_leaves_room_for_its_longest_form(make_tokenizer):
    tokenizer = make_tokenizer(300)
    tokenizer.chat_template = (
        "<s>{{ messages[0]['content'] }}[assistant]"
        "{% if enable_thinking is defined and not enable_thinking %}[no thoughts]{% endif %}"
    )
    prompt = fit.Prompt("context\n", "question", "answer", ("a",))
    longest = len(tokenizer("<s>context\nquestion[assistant][no thoughts]answer")["input_ids"])
    assert fit.Meter(tokenizer, chat=True).prompts([prompt]) == [longest]


@pytest.mark.parametrize("vocabulary", [259, 20_000])
def test_other_tokenizers_fit_and_fill_too(prepare, make_tokenizer, vocabulary):
    tokenizer = make_tokenizer(vocabulary)
    context = 8192
    suite = prepare(context=context, limit=2, tokenizer=tokenizer)
    assert {"niah_single_1", "niah_single_2", "niah_multikey_3", "vt", "fwe"} <= set(suite.tasks)
    for name, samples in suite.metadata["ruler_samples"].items():
        for doc in samples:
            free = context - TASKS[name].answer_tokens - doc["prompt_tokens"]
            assert 0 <= free <= 0.06 * context, name


def test_b13_generation_is_bounded(prepare, monkeypatch):
    """All tasks at 512 to 1024 tokens end, and few tokens are encoded beyond the prompts themselves."""
    encoded = 0
    count = fit.Meter._count

    def counted(self, texts, special):
        nonlocal encoded
        counts = count(self, texts, special)
        encoded += sum(counts)
        return counts

    monkeypatch.setattr(fit.Meter, "_count", counted)
    for context in (512, 700, 1024):
        suite = prepare(context=context, limit=20)
        for samples in suite.metadata["ruler_samples"].values():
            encoded = 0
            needed = sum(doc["prompt_tokens"] for doc in samples)
            assert encoded <= 4 * needed, samples


def test_the_longest_context(prepare):
    context = 131_072
    names = ("niah_single_1", "niah_single_2", "niah_multikey_3", "vt", "cwe", "fwe")
    suite = prepare(*names, context=context, limit=1)
    for name, samples in suite.metadata["ruler_samples"].items():
        free = context - TASKS[name].answer_tokens - samples[0]["prompt_tokens"]
        assert 0 <= free <= 0.01 * context, name


class _Words:
    """A draft of `unit` words a unit whose cost is told wrongly by a factor."""

    def __init__(self, unit: int, factor: float, least: int = 2, most: int = 5000):
        self.unit, self.factor, self.least, self.most = unit, factor, least, most

    def cost(self, units: int) -> float:
        return units * self.unit * self.factor

    def render(self, units: int) -> fit.Prompt:
        return fit.Prompt("w " * (units * self.unit), "question", "", ("a",))


class _WordMeter:
    def __init__(self):
        self.rounds = 0

    def prompts(self, prompts):
        self.rounds += 1
        return [len(prompt.input.split()) for prompt in prompts]


@pytest.mark.parametrize("factor", [0.2, 0.9, 1.0, 1.1, 3.0])
@pytest.mark.parametrize("room", [40, 1000, 30_000])
def test_fit_finds_the_fullest_prompt_from_a_wrong_estimate(room, factor):
    meter = _WordMeter()
    [(prompt, tokens)] = fit.fit([_Words(17, factor)], meter, base=1, room=room)
    assert tokens == len(prompt.input.split())
    assert room - 17 < tokens <= room
    assert meter.rounds <= 4


def test_fit_halves_the_bracket_when_estimates_mislead():
    class Useless(_Words):
        def cost(self, units: int) -> float:
            return 5.0

    meter = _WordMeter()
    [(_, tokens)] = fit.fit([Useless(17, 1.0)], meter, base=1, room=30_000)
    assert 30_000 - 17 < tokens <= 30_000
    assert meter.rounds <= 20


def test_fit_stops_at_the_most_and_refuses_below_the_least():
    [(_, tokens)] = fit.fit([_Words(10, 1.0, most=7)], _WordMeter(), base=1, room=1000)
    assert tokens == 71
    assert fit.fit([_Words(10, 1.0, least=5), _Words(10, 1.0)], _WordMeter(), base=1, room=30)[0] is None
