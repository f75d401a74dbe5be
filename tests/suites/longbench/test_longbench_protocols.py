"""Papers' protocols as a run makes their prompts, on a small model with a template that can think."""

from __future__ import annotations

import dataclasses

import pytest
from fake_plugins import make_model

from evictbench.evaluation.plan import make_plan
from evictbench.evaluation.settings import RunSettings

THINKER = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<bot>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory, longbench_dir):
    folder = make_model(tmp_path_factory.mktemp("models") / "thinker", weights=False, window=3000)
    (folder / "chat_template.jinja").write_text(THINKER)
    return RunSettings(
        policy="full", suite="longbench", tasks="qasper,trec", limit=1, model=str(folder), data_dir=longbench_dir
    )


def prompts(settings, **changes):
    """The plan, and by task the first prompt's text and limit."""
    plan = make_plan(dataclasses.replace(settings, **changes))
    return plan, {
        planned.prompt.task: (plan.tokenizer.decode(planned.prompt.ids), planned.max_new_tokens)
        for planned in plan.prompts
    }


def test_indexmem_pp_does_not_think(settings):
    """A thought would fill the 128 tokens of the answer."""
    plan, theirs = prompts(settings, protocol="indexmem_pp")
    assert theirs["qasper"][0].endswith("<bot><think>\n\n</think>\n\n")
    assert "<bot>" not in theirs["trec"][0]  # the few-shot tasks are never in the template
    assert (plan.thinking.on, plan.differs, plan.checked.protocol.question) == (False, {}, "unseen")
    own, ours = prompts(settings)
    assert own.thinking.on
    assert ours["qasper"][0].endswith("<bot>")
    assert own.fingerprint["protocol"]["thoughts"] != plan.fingerprint["protocol"]["thoughts"]


@pytest.mark.parametrize(("protocol", "context"), [("distillcache_2k", 2048), ("distillcache", 3000)])
def test_distillcaches_lengths_hold_prompt_and_answer(settings, protocol, context):
    plan, made = prompts(settings, protocol=protocol, tasks="narrativeqa_rouge,gov_report", limit=3)
    lengths = [len(planned.prompt.ids) for planned in plan.prompts]
    assert {limit for _, limit in made.values()} == {512}
    assert max(lengths) <= context - 512
    assert plan.fingerprint["protocol"]["context"] == (2048 if context == 2048 else None)
    assert (plan.answers_cut, plan.differs) == ({}, {})


def test_a_system_prompt_counts_when_a_prompt_is_cut(settings):
    said = "Read with care, and say no more than what is asked of you. " * 8
    for changes in ({}, {"system_prompt": said}):
        plan, made = prompts(settings, context=700, tasks="qasper", limit=3, **changes)
        lengths = [len(planned.prompt.ids) for planned in plan.prompts]
        assert all(540 < length <= 700 - 128 for length in lengths)  # cut, and as full as the longest template allows
        assert made["qasper"][0].startswith("<system>Read with care" if changes else "<user>You are given")
