"""Chat templates in the style of the known kinds: what each is given, what is refused, and what ends a turn."""

from __future__ import annotations

import copy
import time

import pytest
from fake_plugins import TOY, make_tokenizer, prepare

from evictbench.errors import UserError
from evictbench.evaluation import tasks
from evictbench.generation.end_tokens import end_tokens
from evictbench.suite import SuiteRequest, chat_template

GO_ON = "{% if add_generation_prompt %}<bot>{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}Today is {{ strftime_now('%d %b %Y') }}. "
    "{% for m in messages %}<|start|>{{ m['role'] }}<|stop|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}" + GO_ON
)
MISTRAL = (  # strict turns, the system's text in the last user's turn
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set said = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}{% for m in turns %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {% if loop.last and said is defined %}{{ said + '\n\n' }}{% endif %}"
    "{{ m['content'] }} [/INST]{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
GEMMA = (  # refuses the system
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
VISION = (  # content as a list of parts, and nothing else
    "{% for m in messages %}<user>{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}</s>{% endfor %}" + GO_ON
)
VISION_STRICT = "{% if messages[0]['content'] is string %}{{ raise_exception('a list, please') }}{% endif %}" + VISION
EITHER = (
    "{% for m in messages %}<user>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}</s>{% endfor %}" + GO_ON
)
NO_SYSTEM = "{% for m in messages if m['role'] != 'system' %}<user>{{ m['content'] }}</s>{% endfor %}" + GO_ON
STRIPS = "{% for m in messages %}<user>{{ m['content'] | trim }}</s>{% endfor %}" + GO_ON
NO_GENERATION_PROMPT = "{% for m in messages %}<user>{{ m['content'] }}</s>\n{% endfor %}"
NO_END = "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}{% endfor %}"
JSON = "{{ messages | tojson }}" + GO_ON

GOOD = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "vision": VISION,
    "vision, strict": VISION_STRICT,
    "either": EITHER,
    "no system": NO_SYSTEM,
    "strips": STRIPS,
    "no generation prompt": NO_GENERATION_PROMPT,
    "no end": NO_END,
    "json": JSON,
}
IN_PARTS = {"vision", "vision, strict"}
WITHOUT_SYSTEM = {"gemma", "no system"}

RAISES = "{{ raise_exception('only on Sundays') }}"
BROKEN = "{% for m in messages %}{{ m['content'] }}"
IGNORES = "{% for m in messages %}<user>Hello!</s>{% endfor %}" + GO_ON
PRINTS = "{% for m in messages %}<user>{{ m['content']['text'] }}</s>{% endfor %}"
FORGETS = "{% for m in messages %}<user>{{ m['content'].replace('Remember', '') }}</s>{% endfor %}" + GO_ON
REFUSES = "{% if 'Remember' in messages[0]['content'] %}{{ raise_exception('too much') }}{% endif %}"
REPEATS = "{% for i in range(1000) %}{{ 'x' * 10000000 }}{% endfor %}" + CHATML
REPEATS_IN_A_BLOCK = "{% set all %}{% for i in range(1000) %}{{ 'x' * 10000000 }}{% endfor %}{% endset %}" + CHATML
REPEATS_THE_USER = "{% for m in messages %}{% for i in range(9999) %}{{ m['content'] }}{% endfor %}{% endfor %}"
NEVER_ENDS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}" + CHATML
HUGE = "{# " + "x" * 1_000_001 + " #}" + CHATML

BAD = {
    "raises": (RAISES, r"The chat template of tiny cannot render a user's turn: only on Sundays\."),
    "broken": (BROKEN, r"The chat template of tiny cannot render a user's turn: Unexpected end of template"),
    "ignores": (IGNORES, r"The chat template of tiny leaves out what the user says"),
    "prints": (PRINTS, r"The chat template of tiny leaves out what the user says"),
    "repeats": (REPEATS, r"The chat template of tiny makes more than 100,\d+ characters"),
    "repeats in a block": (REPEATS_IN_A_BLOCK, r"The chat template of tiny makes more than 100,\d+ characters"),
    "repeats the user": (REPEATS_THE_USER, r"The chat template of tiny makes more than 100,\d+ characters"),
    "never ends": (NEVER_ENDS, r"The chat template of tiny takes more than 0.1 seconds"),
    "huge": (HUGE, r"The chat template of tiny has 1,\d{3},\d{3} characters"),
}


@pytest.fixture(scope="module")
def plain():
    return make_tokenizer()


@pytest.fixture
def tokenizer(plain):
    return copy.copy(plain)


def text_of(tokenizer, template, messages, name=None, **options):
    tokenizer.chat_template = template
    chosen = chat_template.choose(tokenizer, name, "tiny")
    return chosen, chat_template.render(tokenizer, messages, add_generation_prompt=True, **options)


@pytest.mark.parametrize(
    ("name", "question"),
    [(name, question) for name in GOOD for question in ("seen", "unseen") if (name, question) != ("json", "unseen")],
)
def test_the_prompt_of_every_template_holds_the_document(tokenizer, name, question):
    tokenizer.chat_template = GOOD[name]
    chosen = chat_template.choose(tokenizer, None, "tiny")
    assert chosen.parts == (name in IN_PARTS)
    assert (chosen.identity is None) == (name not in IN_PARTS)
    loaded = tasks.load_tasks(
        TOY, prepare(SuiteRequest(tokenizer=tokenizer, chat=True, tasks=("toy_recall",), limit=2))
    )
    field = "context" if question == "unseen" else None
    (task,) = loaded.values()
    for prompt, doc in zip(
        tasks.prompts(task, tokenizer, chat=True, context_field=field, limit=2), task.task_docs, strict=False
    ):
        text = tokenizer.decode(prompt.ids)
        assert text.endswith(doc["gen_prefix"])
        assert chat_template.holds(text, doc["input"])
        if name != "json":
            assert text.count(doc["input"].strip()) == 1
            assert "type" not in text
        if question == "unseen":
            assert doc["context"] in tokenizer.decode(prompt.ids[: prompt.border])


def test_a_context_in_another_spelling_has_no_border(tokenizer):
    tokenizer.chat_template = JSON
    (task,) = tasks.load_tasks(TOY, prepare(SuiteRequest(tokenizer, True, ("toy_recall",), limit=1))).values()
    with pytest.raises(UserError, match=r"toy toy_recall, sample 0 .*use --question seen"):
        list(tasks.prompts(task, tokenizer, chat=True, context_field="context", limit=1, suite="toy"))


@pytest.mark.parametrize("name", GOOD)
def test_a_system_message_is_never_lost(tokenizer, name):
    turns = [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
    ]
    _, text = text_of(tokenizer, GOOD[name], turns)
    assert chat_template.takes_system(tokenizer) == (name not in WITHOUT_SYSTEM)
    if name in WITHOUT_SYSTEM:
        assert "Be brief.\n\nOne?" in text
    assert all(text.count(said) == 1 for said in ("Be brief.", "One?", "Yes.", "Two?"))
    assert turns[0]["role"] == "system", "the caller's messages stay as they are"


@pytest.mark.parametrize("name", BAD)
def test_a_bad_template_is_a_sentence_and_takes_no_time(tokenizer, name, monkeypatch):
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.1 if name == "never ends" else 20.0)
    template, sentence = BAD[name]
    started = time.process_time()
    with pytest.raises(UserError, match=sentence):
        text_of(tokenizer, template, [{"role": "user", "content": "Why?"}])
    assert time.process_time() - started < 10


def test_a_limit_that_was_met_does_not_stay(tokenizer):
    """Whoever renders by himself afterwards meets none of the limits."""
    text_of(tokenizer, STRIPS, [{"role": "user", "content": "Why?"}])
    long = [{"role": "user", "content": "word " * 100_000}]
    assert len(tokenizer.apply_chat_template(long, tokenize=False)) > 400_000


def test_a_document_that_is_cut_or_refused_is_named(tokenizer):
    (task,) = tasks.load_tasks(TOY, prepare(SuiteRequest(tokenizer, True, ("toy_recall",), limit=1))).values()
    tokenizer.chat_template = FORGETS
    chosen = chat_template.choose(tokenizer, None, "tiny")  # it shows other texts whole
    made = {"chat": True, "context_field": None, "limit": 1, "template": str(chosen), "suite": "toy"}
    with pytest.raises(UserError, match=r"template of tiny leaves out .* user \(toy toy_recall, sample 0\)"):
        list(tasks.prompts(task, tokenizer, **made))
    tokenizer.chat_template = REFUSES + CHATML
    with pytest.raises(UserError, match=r"template of tiny cannot render toy toy_recall, sample 0: too much\."):
        list(tasks.prompts(task, tokenizer, **made))


def test_strict_turns_in_the_wrong_order_are_a_sentence(tokenizer):
    twice = [{"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}]
    with pytest.raises(UserError, match=r"cannot render a conversation: roles must alternate\."):
        text_of(tokenizer, MISTRAL, twice)


@pytest.mark.parametrize(
    ("brought", "name", "found"),
    [
        (CHATML, None, "default"),
        (CHATML, "default", "default"),
        ({"default": CHATML, "rag": STRIPS}, None, "default"),
        ({"default": CHATML, "rag": STRIPS}, "rag", "rag"),
        ({"chat": CHATML}, None, "chat"),
        ({"chat": CHATML, "rag": STRIPS}, "rag", "rag"),
    ],
)
def test_one_of_several_templates_is_chosen(tokenizer, brought, name, found):
    chosen, text = text_of(tokenizer, brought, [{"role": "user", "content": "Why?"}], name)
    template = brought[found] if isinstance(brought, dict) else brought
    assert (chosen.name, chosen.text, tokenizer.chat_template) == (found, template, template)
    assert text.startswith("<user>" if template == STRIPS else "<|im_start|>user")
    assert (chosen.identity is None) == (found == "default")


@pytest.mark.parametrize(
    ("brought", "name", "sentence"),
    [
        (
            {"rag": STRIPS, "chat": CHATML},
            None,
            r"several chat templates and no default: choose one of chat, rag with",
        ),
        ({"rag": STRIPS, "chat": CHATML}, "chatt", r"Unknown chat template 'chatt' of tiny: did you mean chat\?"),
        (CHATML, "rag", r"Unknown chat template 'rag' of tiny: there is default\."),
    ],
)
def test_a_template_that_cannot_be_chosen_is_a_sentence(tokenizer, brought, name, sentence):
    with pytest.raises(UserError, match=sentence):
        text_of(tokenizer, brought, [{"role": "user", "content": "Why?"}], name)


@pytest.mark.parametrize(
    ("name", "special", "end"),
    [
        ("chatml", ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
        ("chatml", [], None),  # to this tokenizer the marker is letters
        ("llama3", ["<|eot|>"], "<|eot|>"),
        ("mistral", [], "</s>"),
        ("gemma", ["<end_of_turn>", "<start_of_turn>"], "<end_of_turn>"),
        ("vision", [], "</s>"),
        ("no system", ["</s>\n"], "</s>"),
        ("no generation prompt", ["</s>\n"], "</s>\n"),  # the longest token that stands there
        ("no end", ["<|im_end|>"], None),
    ],
)
def test_the_token_behind_an_answer_ends_it(tokenizer, name, special, end):
    own = make_tokenizer() if special else tokenizer
    own.add_special_tokens({"additional_special_tokens": special}) if special else None
    text_of(own, GOOD[name], [{"role": "user", "content": "Why?"}])
    assert chat_template.end_of_turn(own) == end
    stated = own.convert_tokens_to_ids("<bot>")
    found = end_tokens(stated, own)
    wanted = {stated, own.eos_token_id} | ({own.convert_tokens_to_ids(end)} if end else set())
    assert found.ids == wanted
    assert found.identity == ", ".join(map(str, sorted(wanted)))
    assert f"<bot> ({stated})" in found.record


def test_end_tokens_that_are_all_stated_need_no_mention(tokenizer):
    text_of(tokenizer, STRIPS, [{"role": "user", "content": "Why?"}])
    for stated in (tokenizer.eos_token_id, [tokenizer.eos_token_id, 7], None):
        assert end_tokens(stated, tokenizer).identity is None
    tokenizer.chat_template = {"a": STRIPS, "b": CHATML}
    assert end_tokens([7], tokenizer).ids == {7, tokenizer.eos_token_id}
