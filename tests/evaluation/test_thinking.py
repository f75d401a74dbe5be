"""Thinking models: the template's switch, what the prompt opens, and the answer apart from the thought."""

import dataclasses

import pytest
from fake_plugins import TOY, FakeGenerator, make_model, make_tokenizer, prepare

from evictbench import registry
from evictbench.errors import UserError
from evictbench.evaluation import tasks, thinking
from evictbench.evaluation.plan import make_plan
from evictbench.evaluation.run import run
from evictbench.evaluation.settings import RunSettings
from evictbench.evaluation.thinking import Answer, Thinking, strip_thought
from evictbench.store import run_folder
from evictbench.suite import Protocol, SuiteRequest

TURNS = "{% for m in messages %}<user>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<bot>"
EMPTY = "{{ '<think>\\n\\n</think>\\n\\n' }}"

NONE = TURNS + "{% endif %}"
QWEN3 = TURNS + "{% if enable_thinking is defined and not enable_thinking %}" + EMPTY + "{% endif %}{% endif %}"
QWEN3_THINKING = TURNS + "{{ '<think>\\n' }}{% endif %}"
QWQ = "{# '</think>' #}" + NONE.replace("m['content']", "m['content'].split('</think>')[-1]")
GRANITE = "{% if thinking %}Think in <think></think>.{% endif %}" + NONE
DEEPSEEK31 = TURNS + "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
IN_A_MACRO = (
    "{% macro end() %}{% if enable_thinking is defined and not enable_thinking %}" + EMPTY + "{% endif %}{% endmacro %}"
) + (TURNS + "{{ end() }}{% endif %}")


@pytest.mark.parametrize(
    ("text", "opened", "answer", "thought"),
    [
        ("<think>one\n</think>\n\nThe answer is 7.", False, "The answer is 7.", "closed"),
        ("one\n</think>\n\nThe answer is 7.", True, "The answer is 7.", "closed"),
        ("one</think>7", False, "7", "closed"),
        ("<think>the answer is 7", False, "", "unclosed"),
        ("the answer is 7", True, "", "unclosed"),
        ("", True, "", "unclosed"),
        ("<think>", False, "", "unclosed"),
        ("<think>a\n\nQ: b", False, "", "unclosed"),
        ("<think>a</think>6</think>7", False, "7", "closed"),
        ("a</think>6 no, <think>b</think> 7", True, "7", "closed"),
        ("<think>a</think>6 no, <think>7", False, "", "unclosed"),
        ("<think>\n\n</think>\n\n7", False, "7", "closed"),
        ("<think>a</think>", False, "", "closed"),
        (" 7 ", False, " 7 ", "none"),
        ("", False, "", "none"),
        ("I think it is 7 (think!)", False, "I think it is 7 (think!)", "none"),
    ],
)
def test_b8_what_is_graded_follows_the_closed_thought(text, opened, answer, thought):
    assert strip_thought(text, opened) == Answer(answer, thought)


def tokenizer_with(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "wanted", "found", "tail"),
    [
        (NONE, "auto", Thinking(), "<bot>"),
        (NONE, "off", Thinking(), "<bot>"),
        (QWEN3, "auto", Thinking(on=True), "<bot>"),
        (QWEN3, "on", Thinking(on=True), "<bot>"),
        (QWEN3, "off", Thinking(), "<bot><think>\n\n</think>\n\n"),
        (IN_A_MACRO, "auto", Thinking(on=True), "<bot>"),
        (IN_A_MACRO, "off", Thinking(), "<bot><think>\n\n</think>\n\n"),
        (QWEN3_THINKING, "auto", Thinking(on=True, opened=True), "<bot><think>\n"),
        (QWEN3_THINKING, "on", Thinking(on=True, opened=True), "<bot><think>\n"),
        (QWQ, "auto", Thinking(on=True), "<bot>"),
        (QWQ, "on", Thinking(on=True), "<bot>"),
        (QWQ, "off", Thinking(), "<bot>"),
        (GRANITE, "auto", Thinking(), "<bot>"),
        (GRANITE, "on", Thinking(on=True), "<bot>"),
        (GRANITE, "off", Thinking(), "<bot>"),
        (DEEPSEEK31, "auto", Thinking(), "<bot></think>"),
        (DEEPSEEK31, "on", Thinking(on=True, opened=True), "<bot><think>"),
        (DEEPSEEK31, "off", Thinking(), "<bot></think>"),
    ],
)
def test_the_switch_is_the_templates_own(template, wanted, found, tail):
    tokenizer = tokenizer_with(template)
    assert thinking.set_switch(tokenizer, wanted, "tiny") == found
    turns = [{"role": "user", "content": "7?"}]
    # Whoever renders with this tokenizer afterwards, a suite that measures prompts too, gets the switched one.
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text.endswith(f"7?</s>{tail}")
    assert ("Think in" in text) == (template == GRANITE and found.on)


def test_the_switch_leaves_the_rest_of_a_template_alone():
    for template in ("\n" + QWEN3, QWEN3):
        plain, switched = tokenizer_with(template), tokenizer_with(template)
        thinking.set_switch(switched, "on", "tiny")
        turns = [{"role": "user", "content": "7?"}]
        assert switched.apply_chat_template(turns, tokenize=False) == plain.apply_chat_template(turns, tokenize=False)


@pytest.mark.parametrize(
    ("template", "wanted", "sentence"),
    [
        (NONE, "on", "The chat template of tiny has no switch for thinking: leave out --thinking on."),
        (QWEN3_THINKING, "off", "opens a thought and has no switch: leave out --thinking off."),
    ],
)
def test_what_a_template_cannot_do_is_refused(template, wanted, sentence):
    with pytest.raises(UserError) as refusal:
        thinking.set_switch(tokenizer_with(template), wanted, "tiny")
    assert sentence in str(refusal.value)


def test_a_tokenizer_that_drops_the_end_of_thoughts_from_its_text_cannot_think():
    tokenizer = tokenizer_with(QWEN3)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    with pytest.raises(UserError, match="cannot be told from thoughts: use --thinking off"):
        thinking.set_switch(tokenizer, "auto", "tiny")
    assert thinking.set_switch(tokenizer, "off", "tiny") == Thinking()


def first_prompt(template, wanted, chat=True):
    tokenizer = tokenizer_with(template)
    found = thinking.set_switch(tokenizer, wanted, "tiny")
    request = SuiteRequest(tokenizer=tokenizer, chat=chat, limit=1)
    task = tasks.load_tasks(TOY, prepare(request))["toy_recall"]
    (prompt,) = tasks.prompts(task, tokenizer, chat=chat, context_field="context", limit=1, thinking=found)
    return prompt, tokenizer.decode(prompt.ids)


def test_b12_a_thought_replaces_the_answer_prefix():
    """A prefix that stands before the thought would be an answer begun without thinking."""
    prompt, text = first_prompt(QWEN3, "on")
    assert text.endswith("remembered?</s><bot>")
    assert prompt.thinking == Thinking(on=True)
    _, text = first_prompt(QWEN3_THINKING, "auto")
    assert text.endswith("remembered?</s><bot><think>\n")
    prompt, text = first_prompt(QWEN3, "off")
    assert text.endswith("remembered?</s><bot><think>\n\n</think>\n\nIt was")
    assert prompt.thinking == Thinking()
    prompt, text = first_prompt(QWEN3, "on", chat=False)
    assert text.endswith("remembered? It was")
    assert prompt.thinking == Thinking()


def thinker(tmp_path, template):
    folder = make_model(tmp_path / "thinker", weights=False)
    (folder / "chat_template.jinja").write_text(template)
    return RunSettings(policy="hoard", suite="toy", budget="16", model=str(folder), out=tmp_path / "runs", limit=3)


class Watch:
    def __getattr__(self, name):
        return lambda *_: None


class Thinker(FakeGenerator):
    """Closes the thought of every document but the second."""

    def answer(self, request):
        done = super().answer(request)
        said = f"is it {done.text}?" if request.key[1] == 1 else f"hm</think>\n\n{done.text}"
        return dataclasses.replace(done, text=said, truncated=False)


def test_an_unclosed_thought_is_wrong_and_truncated_and_its_line_says_so(tmp_path, monkeypatch):
    settings = dataclasses.replace(thinker(tmp_path, QWEN3_THINKING), tasks="toy_recall")
    graded = []

    def lenient(task, doc_id, text):
        graded.append((doc_id, text))
        return tasks.GradedAnswer(1.0, {"score": 1.0}, "answer")  # likes anything, the empty text too

    monkeypatch.setattr(tasks, "score", lenient)
    requests = []
    outcome = run(settings, Watch(), lambda plan: (Thinker(plan.tokenizer, seen=requests), "cpu"))
    assert all(request.thinking for request in requests)
    lines = {key[1]: line for key, line in run_folder.read_samples(outcome.plan.folder).items()}
    assert [lines[i]["thinking"] for i in range(3)] == ["closed", "unclosed", "closed"]
    assert [lines[i]["score"] for i in range(3)] == [1.0, 0.0, 1.0]
    assert [lines[i]["answer"] for i in range(3)] == ["answer", "", "answer"]
    assert [lines[i]["truncated"] for i in range(3)] == [False, True, False]
    assert lines[1]["metrics"]["score"] == 0.0
    assert lines[1]["text"].startswith("is it")  # all of it stays in the line
    assert all("think" not in text and not text.startswith("\n") for _, text in graded)
    assert dict(graded)[1] == ""
    row = outcome.summary["tasks"]["toy_recall"]
    assert row["score"] == pytest.approx(2 / 3)
    assert row["truncated"] == row["unclosed"] == pytest.approx(1 / 3)


def test_thinking_is_in_the_fingerprint_and_a_change_of_it_is_named(tmp_path):
    settings = thinker(tmp_path, QWEN3)
    auto, on, off = (make_plan(dataclasses.replace(settings, thinking=word)) for word in ("auto", "on", "off"))
    assert run_folder.fingerprint_hash(auto.fingerprint) == run_folder.fingerprint_hash(on.fingerprint)
    assert [planned.prompt.ids for planned in auto.prompts] == [planned.prompt.ids for planned in on.prompts]
    assert run_folder.fingerprint_hash(auto.fingerprint) != run_folder.fingerprint_hash(off.fingerprint)
    assert auto.differs == on.differs == {}
    assert off.differs == {"thinking": (False, True)}
    assert off.fingerprint["protocol"]["differs"] == ["thinking"]


def test_thinking_needs_the_chat_template(tmp_path):
    settings = dataclasses.replace(thinker(tmp_path, QWEN3), chat="off", thinking="on")
    with pytest.raises(UserError, match="this run uses none"):
        make_plan(settings)
    assert make_plan(dataclasses.replace(settings, thinking="off")).thinking == Thinking()


OFF, ON, UNSAID = (Protocol(source="a paper", tasks=TOY.tasks, thinking=word) for word in (False, True, None))
NO_SWITCH_ON = "the chat template of thinker has no switch for it: the answers are as the template has them"
NO_SWITCH_OFF = "the chat template of thinker has no switch for it: answers may begin with a thought all the same"


@pytest.mark.parametrize(
    ("template", "protocol", "option", "found", "differs", "warning"),
    [
        (QWEN3, OFF, "auto", Thinking(), {}, ""),
        (QWEN3, ON, "auto", Thinking(on=True), {}, ""),
        (QWEN3, UNSAID, "auto", Thinking(on=True), {}, ""),
        (QWEN3, OFF, "on", Thinking(on=True), {"thinking": (True, False)}, ""),
        (QWEN3, ON, "off", Thinking(), {"thinking": (False, True)}, ""),
        (QWEN3, UNSAID, "off", Thinking(), {"thinking": (False, True)}, ""),
        (GRANITE, ON, "auto", Thinking(on=True), {}, ""),
        (GRANITE, OFF, "auto", Thinking(), {}, ""),
        (NONE, OFF, "auto", Thinking(), {}, ""),
        (NONE, ON, "auto", Thinking(), {"thinking": (False, True)}, NO_SWITCH_ON),
        (QWQ, ON, "auto", Thinking(on=True), {}, ""),
        (QWQ, OFF, "auto", Thinking(), {}, NO_SWITCH_OFF),
        (QWEN3_THINKING, ON, "auto", Thinking(on=True, opened=True), {}, ""),
        (QWEN3_THINKING, OFF, "on", Thinking(on=True, opened=True), {"thinking": (True, False)}, ""),
    ],
)
def test_a_protocol_says_whether_the_model_thinks(
    tmp_path, monkeypatch, template, protocol, option, found, differs, warning
):
    protocols = {"default": Protocol(source="", tasks=TOY.tasks), "paper": protocol}
    monkeypatch.setattr(registry, "load_suite", lambda name: dataclasses.replace(TOY, protocols=protocols))
    settings = dataclasses.replace(thinker(tmp_path, template), protocol="paper", thinking=option)
    plan = make_plan(settings)
    assert (plan.thinking, plan.differs) == (found, differs)
    assert plan.fingerprint["protocol"]["thoughts"] == found.on
    assert plan.fingerprint["protocol"]["differs"] == [*differs]
    assert [warning in sentence for sentence in plan.template_warnings] == [True] * bool(warning)


def test_a_protocol_without_thoughts_is_refused_where_the_template_opens_one(tmp_path, monkeypatch):
    monkeypatch.setattr(
        registry, "load_suite", lambda name: dataclasses.replace(TOY, protocols={"default": UNSAID, "paper": OFF})
    )
    with pytest.raises(UserError) as refusal:
        make_plan(dataclasses.replace(thinker(tmp_path, QWEN3_THINKING), protocol="paper"))
    assert str(refusal.value) == (
        "In the protocol paper the model does not think, and the chat template of thinker opens a thought and has no "
        "switch: use --thinking on, which the result names as a difference, or another model."
    )


def test_plain_text_has_no_thoughts_and_a_protocol_that_wants_them_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(
        registry, "load_suite", lambda name: dataclasses.replace(TOY, protocols={"default": ON, "paper": OFF})
    )
    plain = dataclasses.replace(thinker(tmp_path, QWEN3), chat="off")
    assert make_plan(plain).differs == {"chat": (False, True), "thinking": (False, True)}
    assert make_plan(dataclasses.replace(plain, protocol="paper")).differs == {"chat": (False, True)}
