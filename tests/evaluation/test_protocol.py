"""Protocols as data: looked up by name, changed by options, and every change named."""

import dataclasses

import pytest
from fake_plugins import TOY, make_model

from evictbench import registry
from evictbench.errors import UserError
from evictbench.evaluation.checks import check
from evictbench.evaluation.plan import make_plan
from evictbench.evaluation.settings import RunSettings
from evictbench.store import run_folder
from evictbench.suite import GREEDY, Protocol, Sampling

WARM = Sampling(temperature=0.6, top_p=0.95, top_k=20)
PROTOCOLS = {
    "default": Protocol(source="a card", tasks=("toy_recall", "toy_pairs"), sampling=WARM, repeats=2),
    "paper": Protocol(source="a paper", tasks=("toy_pairs",), question="seen", max_new_tokens=9, chat=False),
    "many": Protocol(source="another", tasks=("toy_recall", "toy_pairs"), sampling=WARM, repeats=16),
    "lengths": Protocol(source="a third", tasks=("toy_recall",), context=200, limit=2, share_of="context"),
}
MODELS = {"qwen3-*-instruct-*": Sampling(0.7, 0.8, 20, 0.0), "qwen3-*": Sampling(1.0), "tiny": GREEDY}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", weights=False)


@pytest.fixture
def asked(monkeypatch):
    """The toy suite has protocols here, and what is asked of it is noted."""
    requests = []

    def prepare(request):
        requests.append(request)
        return TOY.prepare(request)

    suite = dataclasses.replace(TOY, protocols=PROTOCOLS, prepare=prepare)
    monkeypatch.setattr(registry, "load_suite", lambda name: suite)
    return requests


@pytest.fixture
def settings(asked, model, tmp_path):
    return RunSettings(policy="hoard", suite="toy", budget="16", model=str(model), out=tmp_path / "runs")


def changed(settings, **changes):
    return dataclasses.replace(settings, **changes)


def mark(settings):
    return run_folder.fingerprint_hash(make_plan(settings).fingerprint)


def test_a_suite_without_protocols_is_greedy_once(model):
    chosen = check(RunSettings(policy="hoard", suite="toy", budget="16", model=str(model))).protocol
    assert (chosen.name, chosen.sampling, chosen.repeats, chosen.question) == ("default", GREEDY, 1, "unseen")
    assert chosen.tasks is None
    assert chosen.differs == {}


def test_the_protocol_decides_what_no_option_does(settings, asked):
    plan = make_plan(settings)
    assert plan.checked.protocol.sampling == WARM
    assert [planned.repeat for planned in plan.prompts] == [0] * 8 + [1] * 8
    assert asked[-1].tasks is None  # the suite's own set, so that what has no data is skipped and not refused
    assert plan.fingerprint["protocol"] == {
        "name": "default",
        "context": 256,
        "question": "unseen",
        "chat": True,
        "thoughts": False,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "max_new_tokens": "auto",
        "card_limit": None,
        "prefill": "native",
        "chunk": 512,
        "differs": [],
    }
    plan = make_plan(changed(settings, protocol="paper"))
    assert plan.checked.protocol.sampling == GREEDY
    assert asked[-1].tasks == ("toy_pairs",)
    assert (asked[-1].window, asked[-1].max_new_tokens, asked[-1].chat) == (512, 9, False)
    assert {planned.max_new_tokens for planned in plan.prompts} == {9}
    assert all(planned.prompt.border is None for planned in plan.prompts)
    assert (plan.answers_cut, plan.differs) == ({}, {})


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"temperature": 1.0, "top_p": 0.8}, {"temperature": (1.0, 0.6), "top_p": (0.8, 0.95)}),
        ({"temperature": 0.6, "top_k": 20, "repeats": 2}, {}),
        ({"min_p": 0.1}, {"min_p": (0.1, 0.0)}),
        ({"temperature": 0.0, "repeats": 1}, {"temperature": (0.0, 0.6), "repeats": (1, 2)}),
        ({"repeats": 4}, {"repeats": (4, 2)}),
        ({"question": "seen"}, {"question": ("seen", "unseen")}),
        ({"question": "unseen"}, {}),
        ({"chat": "off"}, {"chat": (False, True)}),
        ({"chat": "on"}, {}),
        ({"max_new_tokens": "15"}, {"max_new_tokens": (15, "12, 20")}),
        ({"tasks": "toy_pairs"}, {}),
        ({"protocol": "paper", "tasks": "toy_recall"}, {"tasks": ("toy_recall", "toy_pairs")}),
        ({"protocol": "paper", "max_new_tokens": "9"}, {}),
        ({"protocol": "paper", "max_new_tokens": "5"}, {"max_new_tokens": (5, "9")}),
        ({"protocol": "paper", "chat": "on"}, {"chat": (True, False)}),
        ({"protocol": "paper", "temperature": 0.6}, {"temperature": (0.6, 0.0)}),
    ],
)
def test_what_an_option_changes_is_named(settings, changes, differs):
    plan = make_plan(changed(settings, **changes))
    assert plan.differs == differs
    assert plan.fingerprint["protocol"]["differs"] == sorted(differs.keys() - {"repeats"})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"protocol": "papper"}, "The suite toy has no protocol 'papper': there are default, paper, many, lengths."),
        ({"protocol": "x"}, "The suite toy has no protocol 'x': there are default, paper, many, lengths."),
        ({"repeats": 0}, "--repeats is 0; it has to be at least 1."),
        ({"at": 0}, "--at is 0; it has to be at least 1."),
        ({"at": 3}, "--at is 3, and there are 2 answers per document"),
        ({"repeats": 4, "at": 5}, "--at is 5, and there are 4 answers per document"),
        ({"temperature": 0.0}, "Greedy answers are the same every time, so 2 repeats say no more than one"),
        ({"protocol": "paper", "repeats": 2}, "Greedy answers are the same every time"),
        ({"temperature": -0.5}, "--temperature is -0.5; it has to be 0 (greedy) or more"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"top_p": 1.5}, "--top-p is 1.5; it has to be above 0 and up to 1."),
        ({"top_p": 0.0}, "--top-p 0 leaves no token to draw"),
        ({"top_k": -1}, "--top-k is -1; it has to be 0 (all tokens) or more."),
        ({"min_p": 2.0}, "--min-p is 2; it has to be between 0 and 1."),
        ({"protocol": "paper", "top_p": 0.9, "top_k": 5}, "paper of toy is greedy, where --top-p and --top-k would do"),
        ({"temperature": 0.0, "repeats": 1, "min_p": 0.1}, "--temperature 0 is greedy, where --min-p would do nothing"),
        ({"thinking": "of"}, "Unknown value 'of' of --thinking: did you mean off"),
        ({"thinking": "on"}, "The chat template of tiny has no switch for thinking"),
    ],
)
def test_bad_input_is_a_sentence(settings, changes, sentence):
    with pytest.raises(UserError) as refusal:
        make_plan(changed(settings, **changes))
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not settings.out.exists()


def test_how_the_answers_are_made_is_in_the_fingerprint(settings):
    marks = [mark(settings)]
    for changes in (
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 0},
        {"min_p": 0.05},
        {"protocol": "many"},
        {"protocol": "paper"},
        {"protocol": "paper", "temperature": 0.6},
    ):
        marks.append(mark(changed(settings, **changes)))
    assert len(set(marks)) == len(marks)


def test_how_many_answers_are_made_is_not(settings):
    first = mark(settings)
    for changes in ({"repeats": 5}, {"at": 1}, {"skip_overlong": True}, {"temperature": 0.6}):
        assert mark(changed(settings, **changes)) == first, changes


def test_a_protocol_in_chat_needs_a_template(settings, monkeypatch, tmp_path):
    folder = make_model(tmp_path / "plain", weights=False)
    (folder / "chat_template.jinja").unlink()
    chatty = dataclasses.replace(TOY, protocols={"default": Protocol(source="", tasks=TOY.tasks, chat=True)})
    monkeypatch.setattr(registry, "load_suite", lambda name: chatty)
    plain = changed(settings, model=str(folder))
    with pytest.raises(UserError, match="has no chat template: use --chat off"):
        make_plan(plain)
    assert make_plan(changed(plain, chat="off")).differs == {"chat": (False, True)}


def test_the_draw_is_the_samples_own_whatever_the_policy_budget_or_limit(settings):
    plans = [
        make_plan(changed(settings, **changes))
        for changes in ({}, {"policy": "full", "budget": None}, {"budget": "25%"}, {"repeats": 3}, {"limit": 2})
    ]
    draws = [{planned.key: planned.draw for planned in plan.prompts} for plan in plans]
    for other in draws[1:]:
        shared = draws[0].keys() & other.keys()
        assert shared
        assert all(draws[0][key] == other[key] for key in shared)
    whole = draws[3]
    assert len(set(whole.values())) == len(whole) == 24  # no two answers are drawn alike
    assert all(0 <= number < 2**64 and repeat == key[2] for key, (number, repeat) in whole.items())
    # Written down, so that a change of it cannot go unnoticed: sampled runs of before would not go on as they began.
    assert whole["toy_recall", 1, 2] == (9799850320401983600, 2)


@pytest.mark.parametrize(
    ("model", "sampling"),
    [
        ("Qwen/Qwen3-4B-Instruct-2507", Sampling(0.7, 0.8, 20, 0.0)),
        ("Qwen/Qwen3-4B-Instruct-2507@main", Sampling(0.7, 0.8, 20, 0.0)),
        ("QWEN3-4B-instruct-2507", Sampling(0.7, 0.8, 20, 0.0)),
        ("Qwen/Qwen3-8B", Sampling(1.0)),
        ("mine/My-Qwen3-8B", WARM),
        ("Qwen3-4B-Instruct/other", WARM),  # the owner's name is no model's
    ],
)
def test_the_first_pattern_that_fits_a_models_name_says_how_it_is_sampled(model, sampling):
    assert Protocol(source="", tasks=(), sampling=WARM, model_sampling=MODELS).sampling_for(model) == sampling


def test_a_models_own_sampling_is_the_protocols_and_a_change_of_it_is_named(settings, monkeypatch):
    table = {"default": dataclasses.replace(PROTOCOLS["default"], model_sampling=MODELS, repeats=1)}
    monkeypatch.setattr(registry, "load_suite", lambda name: dataclasses.replace(TOY, protocols=table))
    plan = make_plan(settings)  # the model's folder is named tiny
    assert plan.checked.protocol.sampling == GREEDY
    assert plan.fingerprint["protocol"]["temperature"] == 0.0
    assert plan.differs == {}
    assert make_plan(changed(settings, temperature=0.6)).differs == {"temperature": (0.6, 0.0)}


def test_a_fine_tuned_model_is_sampled_as_the_one_it_was_made_from(settings, monkeypatch, tmp_path):
    import json

    table = {"default": dataclasses.replace(PROTOCOLS["default"], model_sampling=MODELS, repeats=1)}
    monkeypatch.setattr(registry, "load_suite", lambda name: dataclasses.replace(TOY, protocols=table))
    folder = make_model(tmp_path / "tiny", weights=False)
    config = json.loads((folder / "config.json").read_text())
    for base, sampling in (
        ({"name": "Qwen/Qwen3-4B-Instruct-2507", "sha256": None, "policy": "kvpop"}, Sampling(0.7, 0.8, 20, 0.0)),
        ("nothing that names one", GREEDY),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"evictbench_base": base}))
        assert check(changed(settings, model=str(folder))).protocol.sampling == sampling


def test_a_protocol_may_say_context_and_limit_and_what_a_share_is_of(settings, asked):
    plan = make_plan(changed(settings, protocol="lengths", budget="25%"))
    assert (asked[-1].context, asked[-1].limit) == (200, 2)
    assert plan.fingerprint["protocol"]["context"] == 200
    assert plan.fingerprint["budget"] == "50"  # of the context that was asked for, not of each prompt
    assert plan.folder == make_plan(changed(settings, protocol="lengths", budget="50")).folder
    assert plan.differs == {}
    plan = make_plan(changed(settings, protocol="lengths", budget="25%", context=240, limit=1))
    assert (asked[-1].context, asked[-1].limit) == (240, 1)
    assert (plan.fingerprint["budget"], plan.differs) == ("60", {"context": (240, 200)})
    assert make_plan(changed(settings, protocol="lengths", budget="1%")).fingerprint["budget"] == "32"  # the least
    assert make_plan(changed(settings, budget="25%")).fingerprint["budget"] == "25%"
    assert make_plan(changed(settings, context=240)).differs == {}  # a protocol that says none is not changed by one
