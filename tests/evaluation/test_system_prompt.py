"""A system prompt of a protocol or an option: in every prompt of the chat template, in the fingerprint, and named."""

import dataclasses

import pytest
from fake_plugins import TOY, make_model

from evictbench import registry
from evictbench.errors import UserError
from evictbench.evaluation.plan import make_plan
from evictbench.evaluation.settings import RunSettings
from evictbench.store import run_folder
from evictbench.suite import Protocol

WITH_ROLE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
WITHOUT_ROLE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
IN_PARTS = "\n" + WITH_ROLE.replace("{{ m['content'] }}", "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}")
ITS_OWN = "{% if messages[0]['role'] != 'system' %}<system>be brief</s>{% endif %}" + WITH_ROLE
SAID = 'Answer as "SAID" {% raw %} {{ x }}\nin two lines, \\n, 数 😀 %}.'

PROTOCOLS = {
    "default": Protocol(source="", tasks=TOY.tasks),
    "paper": Protocol(source="a paper", tasks=TOY.tasks, system_prompt="You count."),
}


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """`settings(template, **changes)`."""
    monkeypatch.setattr(registry, "load_suite", lambda name: dataclasses.replace(TOY, protocols=PROTOCOLS))
    folder = make_model(tmp_path / "tiny", weights=False)

    def make(template=WITH_ROLE, **changes):
        (folder / "chat_template.jinja").write_text(template)
        given = RunSettings(policy="full", suite="toy", model=str(folder), out=tmp_path / "runs", tasks="toy_pairs")
        return dataclasses.replace(given, **changes)

    return make


def prompts(plan):
    return [plan.tokenizer.decode(planned.prompt.ids) for planned in plan.prompts]


@pytest.mark.parametrize(
    ("template", "begins"),
    [
        (WITH_ROLE, f"<system>{SAID}</s><user>"),
        (WITHOUT_ROLE, f"<user>{SAID}\n\n"),
        (IN_PARTS, f"\n<system>{SAID}</s><user>"),
        (ITS_OWN, f"<system>{SAID}</s><user>"),
    ],
)
def test_what_the_system_says_begins_every_prompt_as_it_is(settings, template, begins):
    plain = make_plan(settings(template))
    plan = make_plan(settings(template, system_prompt=f"  {SAID}\n"))
    for with_it, without in zip(prompts(plan), prompts(plain), strict=True):
        assert with_it.startswith(begins)
        question = without.partition("<user>")[2]
        assert with_it == begins + question
    assert plan.fingerprint["protocol"]["system_prompt"] == SAID


def test_a_document_with_a_system_message_of_its_own_keeps_it():
    from fake_plugins import make_tokenizer

    from evictbench.suite import chat_template

    for template, expected in (
        (WITH_ROLE, "<system>You count.\n\nBe kind.</s><user>7?</s><bot>"),
        (WITHOUT_ROLE, "<user>You count.\n\nBe kind.\n\n7?</s><bot>"),
    ):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        chat_template.say(tokenizer, "You count.", chat_template.choose(tokenizer, None, "tiny"))
        turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "7?"}]
        assert chat_template.render(tokenizer, turns, add_generation_prompt=True) == expected


def test_a_run_without_one_keeps_its_fingerprint_and_one_with_it_has_another(settings):
    plan = make_plan(settings())
    assert "system_prompt" not in plan.fingerprint["protocol"]
    marks = [
        run_folder.fingerprint_hash(make_plan(settings(**changes)).fingerprint)
        for changes in ({}, {"system_prompt": " "}, {"system_prompt": "You count."}, {"system_prompt": "You add."})
    ]
    assert marks[0] == marks[1]
    assert len(set(marks)) == 3


@pytest.mark.parametrize(
    ("changes", "said", "differs"),
    [
        ({}, None, {}),
        ({"system_prompt": "You add."}, "You add.", {"system_prompt": ("You add.", None)}),
        ({"protocol": "paper"}, "You count.", {}),
        ({"protocol": "paper", "system_prompt": "You count."}, "You count.", {}),
        ({"protocol": "paper", "system_prompt": ""}, None, {"system_prompt": (None, "You count.")}),
        ({"protocol": "paper", "chat": "off"}, None, {"chat": (False, True), "system_prompt": (None, "You count.")}),
    ],
)
def test_a_change_of_the_protocols_is_named(settings, changes, said, differs):
    plan = make_plan(settings(**changes))
    assert plan.fingerprint["protocol"].get("system_prompt") == said
    assert plan.differs == differs


@pytest.mark.parametrize(
    ("template", "changes", "sentence"),
    [
        (WITH_ROLE, {"chat": "off"}, "A system prompt stands in the chat template, and this run uses none"),
        (
            WITH_ROLE.replace("{{ m['content'] }}", "{{ m['content'] | replace('aloud', 'softly') }}"),
            {},
            "The chat template of tiny leaves out or changes the system prompt",
        ),
    ],
)
def test_a_template_that_cannot_say_it_is_refused(settings, template, changes, sentence):
    with pytest.raises(UserError) as refusal:
        make_plan(settings(template, system_prompt="Think aloud.", **changes))
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)
