"""Prompts: rendered, encoded once, at most one BOS, the border where the context ends; and scores."""

import dataclasses
import shutil

import pytest
from fake_plugins import TOY, make_tokenizer, prepare

from evictbench.errors import UserError
from evictbench.evaluation import tasks
from evictbench.evaluation.thinking import Thinking
from evictbench.suite import SuiteRequest


def load(limit=4, names=None):
    request = SuiteRequest(tokenizer=make_tokenizer(), chat=True, tasks=names, limit=limit)
    return tasks.load_tasks(TOY, prepare(request))


def prompts(tokenizer, chat, context_field="context", task="toy_recall", limit=4):
    loaded = load(limit)[task]
    made = tasks.prompts(loaded, tokenizer, chat=chat, context_field=context_field, limit=limit)
    return loaded, list(made)


def test_the_tasks_are_the_prepared_ones_in_their_order():
    assert list(load(names=("toy_pairs", "toy_recall"))) == ["toy_pairs", "toy_recall"]
    assert {name: tasks.version_of(task) for name, task in load().items()} == {"toy_recall": "1.0", "toy_pairs": "2.0"}


@pytest.mark.parametrize("template_bos", [True, False])
@pytest.mark.parametrize("text_bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_b1_extra_bos(template_bos, text_bos, eos, chat):
    """At most one BOS, only at 0: also where the template emits it and the post-processor adds it too. And no EOS
    at the end of a prompt that wants going on."""
    tokenizer = make_tokenizer(template_bos, text_bos, eos)
    _, made = prompts(tokenizer, chat)
    wanted = template_bos if chat else text_bos
    for prompt in made:
        places = [i for i, token in enumerate(prompt.ids) if token == tokenizer.bos_token_id]
        assert places == ([0] if wanted else [])
        assert prompt.ids[-1] != tokenizer.eos_token_id


def test_b1_a_text_that_begins_with_bos_gets_no_other():
    tokenizer = make_tokenizer(text_bos=True)
    bos = tokenizer.bos_token_id
    (with_bos, without) = tasks.encode(["<s>abc", "abc"], tokenizer, (bos,), context_ends=[4, 1])
    assert with_bos == without == ([bos, *tokenizer("abc", add_special_tokens=False)["input_ids"]], 2)


def test_the_chat_prompt_is_one_user_turn_and_the_answer_prefix_after_the_header():
    tokenizer = make_tokenizer()
    task, made = prompts(tokenizer, chat=True)
    doc = task.task_docs[1]
    assert tokenizer.decode(made[1].ids) == f"<s><user>{doc['input']}</s><bot>{doc['gen_prefix']}"


def test_the_plain_prompt_is_the_text_and_the_answer_prefix():
    tokenizer = make_tokenizer()
    task, made = prompts(tokenizer, chat=False)
    doc = task.task_docs[1]
    assert tokenizer.decode(made[1].ids) == f"<s>{doc['input']} {doc['gen_prefix']}"


@pytest.mark.parametrize("trim_offsets", [None, True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_the_border_is_the_first_token_that_begins_after_the_context(chat, trim_offsets):
    tokenizer = make_tokenizer(trim_offsets=trim_offsets)
    task, made = prompts(tokenizer, chat)
    for prompt, doc in zip(made, task.task_docs, strict=True):
        before = tokenizer.decode(prompt.ids[: prompt.border])
        after = tokenizer.decode(prompt.ids[prompt.border :])
        # The context ends in "." and the question begins with a line break; one token holds both.
        assert before.endswith(doc["context"] + "\n")
        assert after.startswith("What was to be remembered?")
        assert after.endswith(doc["gen_prefix"])


def test_b3_question_seen_or_unseen_is_the_same_prompt_with_and_without_a_border():
    tokenizer = make_tokenizer()
    _, unseen = prompts(tokenizer, chat=True)
    _, seen = prompts(tokenizer, chat=True, context_field=None)
    assert [prompt.ids for prompt in seen] == [prompt.ids for prompt in unseen]
    assert all(prompt.border is None for prompt in seen)
    assert all(0 < prompt.border < len(prompt.ids) for prompt in unseen)


def test_the_border_is_in_tokens_also_where_letters_are_several():
    tokenizer = make_tokenizer()
    text = "é🐦 naïve: 東京 the end. Who?"
    end = text.index(" Who?")
    ((ids, border),) = tasks.encode([text], tokenizer, (), [end])
    assert tokenizer.decode(ids[:border]) == text[:end]
    assert tokenizer.decode(ids[border:]) == " Who?"


def test_blanks_that_a_template_strips_do_not_move_the_border():
    user = "  The context. What?\n"
    rendered = "<s><user>The context. What?</s><bot>"
    end = tasks._context_end(rendered, user, "  The context.", "toy_recall, sample 0")
    assert rendered[:end] == "<s><user>The context."


def test_a_context_that_is_not_in_its_prompt_is_an_error():
    with pytest.raises(UserError, match="The context of toy_recall, sample 3"):
        tasks._context_end("something else", "The context. What?", "The context.", "toy_recall, sample 3")


def test_a_context_told_before_by_the_template_does_not_catch_the_border():
    rendered = "A. B?|A. B?"
    end = tasks._context_end(rendered, "A. B?", "A.", "toy_recall, sample 0")
    assert end == len("A. B?|A.")


def test_b7_no_backslash_n_in_any_prompt():
    tokenizer = make_tokenizer()
    for chat in (True, False):
        for task in ("toy_recall", "toy_pairs"):
            _, made = prompts(tokenizer, chat, task=task)
            assert not any("\\n" in tokenizer.decode(prompt.ids) for prompt in made)


def test_limits_and_stop_strings_come_from_the_card():
    tokenizer = make_tokenizer()
    _, recall = prompts(tokenizer, chat=True, limit=3)
    assert [(one.doc_id, one.max_new_tokens, one.stop) for one in recall] == [(i, 12, ("\n",)) for i in range(3)]
    _, pairs = prompts(tokenizer, chat=True, task="toy_pairs", limit=1)
    assert [(one.max_new_tokens, one.stop) for one in pairs] == [(20, ())]


def test_a_completion_is_filtered_and_graded_by_its_task():
    task = load()["toy_pairs"]
    words = task.task_docs[2]["outputs"]
    assert tasks.score(task, 2, f" {words[0]} {words[1]}").score == 1.0
    assert tasks.score(task, 2, f" {words[1]} or so").score == 0.5
    assert tasks.score(task, 2, "").metrics == {"score": 0.0}


def test_b12_the_answer_prefix_is_not_scored(monkeypatch):
    """What is graded is the completion alone: a prefix that holds the answer earns nothing."""
    task = load()["toy_recall"]
    graded = []
    monkeypatch.setattr(task.config, "process_results", lambda doc, results: graded.append(results) or {"score": 0.0})
    tasks.score(task, 0, " no idea")
    assert graded == [[" no idea"]]


@pytest.mark.parametrize("found", [{"acc": 1.0}, {"score": 1.5}, {"score": float("nan")}])
def test_a_task_without_a_score_is_an_error(monkeypatch, found):
    task = load()["toy_recall"]
    monkeypatch.setattr(task.config, "process_results", lambda doc, results: found)
    with pytest.raises(RuntimeError, match="gave no score between 0 and 1"):
        tasks.score(task, 0, "text")


def test_many_prompts_are_encoded_like_one(monkeypatch):
    tokenizer = make_tokenizer()
    _, many = prompts(tokenizer, chat=True, limit=7)
    monkeypatch.setattr(tasks, "ENCODED_TOGETHER", 1)
    _, single = prompts(tokenizer, chat=True, limit=7)
    assert [prompt.doc_id for prompt in many] == list(range(7))
    assert many == single


def test_a_template_that_asks_for_the_day_is_told_the_same_every_day():
    tokenizer = make_tokenizer()
    plain = tokenizer.chat_template
    asking = "{% if strftime_now is defined %}{% set today = strftime_now('%A, %-d %b %Y') %}{% endif %}"
    tokenizer.chat_template = asking + "{{ today }}. " + plain
    _, made = prompts(tokenizer, chat=True, limit=1)
    assert tokenizer.decode(made[0].ids).startswith("Friday, 26 Jul 2024. <s><user>Remember")


def test_a_tokenizer_without_offsets_is_refused_only_where_the_border_is_needed(monkeypatch):
    tokenizer = make_tokenizer()
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    assert prompts(tokenizer, chat=True, context_field=None)[1]
    with pytest.raises(UserError, match="use --question seen"):
        prompts(tokenizer, chat=True)


@pytest.fixture
def half_chatty(tmp_path):
    """The toy suite with a task that never is in the chat template, and one that states no token limit."""
    folder = tmp_path / "tasks"
    shutil.copytree(TOY.folder, folder)
    for name, old, new in (
        ("recall", "version: 1.0", "version: 1.0\n  chat: false"),
        ("pairs", "  max_gen_toks: 20\n", ""),
    ):
        file = folder / f"{name}.yaml"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
    return dataclasses.replace(TOY, folder=folder)


def test_b6_a_task_may_keep_out_of_the_chat_template(half_chatty):
    tokenizer = make_tokenizer()
    request = SuiteRequest(tokenizer=tokenizer, chat=True, limit=2)
    loaded = tasks.load_tasks(half_chatty, prepare(request))
    texts = {}
    for name, task in loaded.items():
        made = tasks.prompts(
            task, tokenizer, chat=True, context_field="context", limit=2, thinking=Thinking(on=True, opened=True)
        )
        texts[name] = [(tokenizer.decode(prompt.ids), prompt.thinking) for prompt in made]
    assert {name: tasks.uses_chat(task) for name, task in loaded.items()} == {"toy_recall": False, "toy_pairs": True}
    assert all("<user>" in text and thinking.on for text, thinking in texts["toy_pairs"])
    for text, thinking in texts["toy_recall"]:
        assert text.startswith("<s>Remember this.")
        assert text.endswith("remembered? It was")  # no thought comes first, so the answer prefix stays
        assert "<user>" not in text
        assert thinking == Thinking()


def test_a_task_that_states_no_limit_has_lm_evals(half_chatty):
    request = SuiteRequest(tokenizer=make_tokenizer(), chat=True, limit=1)
    loaded = tasks.load_tasks(half_chatty, prepare(request))
    assert {name: tasks.token_limit(task) for name, task in loaded.items()} == {"toy_recall": 12, "toy_pairs": 256}


def test_a_task_may_name_the_answer_that_it_found(monkeypatch):
    task = load()["toy_recall"]
    for found, answer in (({"score": 1, "answer": "7"}, "7"), ({"score": 0, "answer": 7}, "7"), ({"score": 1}, None)):
        monkeypatch.setattr(task.config, "process_results", lambda doc, results, found=found: found)
        scored = tasks.score(task, 0, "text")
        assert scored.answer == answer
        assert scored.metrics == {"score": float(found["score"])}
