"""Everything that can be checked is, before a weight is loaded; the identity of a run is what moves its scores."""

import dataclasses

import pytest
from fake_plugins import make_model

from evictbench.errors import UserError
from evictbench.evaluation.plan import make_plan
from evictbench.evaluation.settings import RunSettings
from evictbench.models import load
from evictbench.store import run_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", weights=False)


@pytest.fixture
def settings(model, tmp_path):
    return RunSettings(policy="hoard", suite="toy", budget="16", model=str(model), out=tmp_path / "runs")


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(load, "load_model", refuse)


def changed(settings, **changes):
    return dataclasses.replace(settings, **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"policy": "hoart"}, "Unknown policy 'hoart': did you mean hoard"),
        ({"policy": "hoard,full"}, "A run takes one policy, and hoard and full are given"),
        ({"policy": "hoard:size=x"}, "The setting size of hoard takes a whole number"),
        ({"suite": "tow"}, "Unknown suite 'tow': did you mean toy?"),
        ({"tasks": "toy_recal"}, "Unknown task 'toy_recal' of toy: did you mean toy_recall"),
        ({"tasks": " , "}, "--tasks names no task"),
        ({"budget": None}, "hoard needs a budget: a number of entries such as 256, or a share such as 25%."),
        ({"budget": "0"}, "keeps nothing"),
        ({"budget": "-3"}, "negative"),
        ({"budget": "120%"}, "over 100%"),
        ({"budget": "much"}, "not a number"),
        ({"policy": "full"}, "full takes no budget"),
        ({"budget": "3"}, "hoard needs a budget of at least 4 entries on tiny"),
        ({"policy": "hoard:size=40", "budget": "10%"}, "not the 32 that 10% of 34 tokens gives"),
        ({"context": 513}, "A context of 513 tokens is longer than the window of tiny, 512 tokens."),
        ({"max_new_tokens": "450"}, "is more than the window of tiny, 512 tokens"),
        ({"max_new_tokens": "few"}, "--max-new-tokens takes a number from 1 to 2,147,483,647, card or auto"),
        ({"max_new_tokens": "0"}, "--max-new-tokens takes a number from 1"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "gpu"}, "gpu"),
        ({"limit": 0}, "--limit is 0; it has to be at least 1."),
        ({"context": -4}, "--context is -4"),
        ({"chunk": 0}, "--chunk is 0"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"question": "unsen"}, "Unknown value 'unsen' of --question: did you mean"),
        ({"prefill": "sparse"}, "Unknown value 'sparse' of --prefill"),
        ({"chat": "yes"}, "Unknown value 'yes' of --chat"),
        ({"dtype": "float17"}, "Unknown value 'float17' of --dtype: did you mean float16"),
    ],
)
def test_bad_input_is_a_sentence_before_weights_load(settings, changes, sentence):
    with pytest.raises(UserError) as refusal:
        make_plan(changed(settings, **changes))
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not settings.out.exists()


@pytest.mark.parametrize("option", ["data_dir", "haystack", "model"])
def test_a_missing_folder_or_file_is_named(settings, tmp_path, option):
    missing = tmp_path / "nowhere" / "at" / "all"
    value = str(missing) if option == "model" else missing
    with pytest.raises(UserError, match="nowhere"):
        make_plan(changed(settings, **{option: value}))


def test_a_results_folder_that_is_not_ours_is_refused(settings, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not a folder of evictbench results"):
        make_plan(changed(settings, out=tmp_path))


def test_a_model_of_which_nothing_can_be_evicted_is_refused(settings, tmp_path):
    from transformers import Qwen3Config

    folder = make_model(tmp_path / "slides", weights=False)
    Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        sliding_window=64,
        use_sliding_window=True,
        max_window_layers=0,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)
    with pytest.raises(UserError, match="nothing to evict"):
        make_plan(changed(settings, model=str(folder)))


def test_a_tokenizer_without_template_cannot_chat(settings, tmp_path):
    folder = make_model(tmp_path / "plain", weights=False)
    (folder / "chat_template.jinja").unlink()
    plan = make_plan(changed(settings, model=str(folder)))
    assert plan.chat is False
    with pytest.raises(UserError, match="has no chat template: use --chat off"):
        make_plan(changed(settings, model=str(folder), chat="on"))


PLAIN_TURNS = (
    "{% for m in messages %}<user>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
PARTS = "{% for m in messages %}<user>{% for p in m['content'] %}{{ p['text'] }}{% endfor %}<bot>{% endfor %}"
SWITCH = PLAIN_TURNS + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def with_templates(folder, default, **named):
    """A model folder with a default template, or none, and others by name."""
    folder = make_model(folder, weights=False)
    (folder / "chat_template.jinja").unlink()
    if default is not None:
        (folder / "chat_template.jinja").write_text(default)
    others = folder / "additional_chat_templates"
    others.mkdir()
    for name, template in named.items():
        (others / f"{name}.jinja").write_text(template)
    return folder


def test_a_chat_template_is_chosen_and_is_in_the_fingerprint_where_it_is_not_the_default(settings, tmp_path):
    folder = with_templates(tmp_path / "several", PLAIN_TURNS, rag=PLAIN_TURNS + "Well: ", vision=PARTS)
    settings = changed(settings, model=str(folder), tasks="toy_recall")
    shared = {}
    plans = {name: make_plan(changed(settings, chat_template=name), shared=shared) for name in (None, "rag", "vision")}
    texts = {name: plan.tokenizer.decode(plan.prompts[0].prompt.ids) for name, plan in plans.items()}
    assert len({run_folder.fingerprint_hash(plan.fingerprint) for plan in plans.values()}) == 3
    assert "chat_template" not in plans[None].fingerprint["protocol"]
    assert plans["rag"].fingerprint["protocol"]["chat_template"].startswith("rag sha256:")
    assert plans["vision"].fingerprint["protocol"]["chat_template"].endswith("(content in parts)")
    assert "<bot>Well: It was" in texts["rag"]
    assert texts["vision"].removeprefix("<user>").startswith("Remember this.")
    assert texts[None] == texts["rag"].replace("Well: ", "")
    again = make_plan(settings)  # nothing that others chose is left behind
    assert again.fingerprint == plans[None].fingerprint


def test_several_chat_templates_without_a_default_are_named(settings, tmp_path):
    folder = with_templates(tmp_path / "several", None, rag=PLAIN_TURNS, chat=PLAIN_TURNS)
    settings = changed(settings, model=str(folder))
    with pytest.raises(UserError, match="several chat templates and no default: choose one of chat, rag with --chat-t"):
        make_plan(settings)
    assert make_plan(changed(settings, chat_template="rag")).template.name == "rag"
    assert make_plan(changed(settings, chat="off")).template is None
    with pytest.raises(UserError, match="so there is none to choose: leave out --chat-template rag"):
        make_plan(changed(settings, chat="off", chat_template="rag"))


def test_cells_that_share_a_tokenizer_do_not_change_each_others_template(settings, tmp_path):
    """What the first cell's switch does to the template is not taken for the template's own default by the second."""
    folder = with_templates(tmp_path / "thinker", SWITCH)
    settings = changed(settings, model=str(folder), thinking="off")
    shared = {}
    first, second = (make_plan(changed(settings, budget=budget), shared=shared) for budget in ("16", "17"))
    auto = make_plan(changed(settings, thinking="auto"), shared=shared)
    assert first.differs == second.differs == {"thinking": (False, True)}
    assert auto.differs == {}
    assert auto.thinking.on


def test_end_tokens_are_in_the_fingerprint_where_the_model_does_not_state_them_all(settings, model, tmp_path):
    assert "end_tokens" not in make_plan(settings).fingerprint["protocol"]
    folder = make_model(tmp_path / "base", weights=False, eos_token_id=7)
    plan = make_plan(changed(settings, model=str(folder)))
    assert plan.fingerprint["protocol"]["end_tokens"] == "7, 263"
    assert plan.end_tokens.record.endswith("(7), </s> (263)")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 263]}')
    assert "end_tokens" not in make_plan(changed(settings, model=str(folder))).fingerprint["protocol"]


def test_a_suite_without_questions_is_seen(settings, monkeypatch):
    from evictbench import registry

    plain = dataclasses.replace(registry.load_suite("toy"), context_field=None)
    monkeypatch.setattr(registry, "load_suite", lambda name: plain)
    plan = make_plan(settings)
    assert plan.checked.protocol.question == "seen"
    assert all(planned.prompt.border is None for planned in plan.prompts)
    with pytest.raises(UserError, match="no question apart from their text"):
        make_plan(changed(settings, question="unseen"))


def test_prompts_go_round_the_tasks(settings):
    plan = make_plan(changed(settings, limit=3))
    assert [planned.key[:2] for planned in plan.prompts] == [
        (task, doc_id) for doc_id in range(3) for task in ("toy_recall", "toy_pairs")
    ]
    assert plan.asked == {"toy_recall": 3, "toy_pairs": 3}


def test_b4_answers_are_cut_to_the_window_only_if_auto_and_it_is_said(settings, tmp_path):
    """Nothing is truncated in silence: not the prompt, ever; not the answer, without a word."""
    longest = max(len(planned.prompt.ids) for planned in make_plan(changed(settings, tasks="toy_pairs")).prompts)
    folder = make_model(tmp_path / "short", weights=False, window=longest + 15)
    short = changed(settings, model=str(folder), tasks="toy_pairs", context=100)
    plan = make_plan(short)
    cut = [planned for planned in plan.prompts if planned.max_new_tokens < 20]
    assert plan.answers_cut == {"toy_pairs": len(cut)}
    assert min(planned.max_new_tokens for planned in plan.prompts) == 15
    with pytest.raises(UserError, match="with 20 for the answer that is more than the window of short"):
        make_plan(changed(short, max_new_tokens="card"))
    assert make_plan(changed(short, max_new_tokens="15")).answers_cut == {"toy_pairs": 4}
    folder = make_model(tmp_path / "shorter", weights=False, window=longest)
    with pytest.raises(UserError, match="is more than the window of shorter"):
        make_plan(changed(short, model=str(folder)))


def mark(settings):
    plan = make_plan(settings)
    assert plan.folder.name.endswith(run_folder.fingerprint_hash(plan.fingerprint))
    return run_folder.fingerprint_hash(plan.fingerprint)


def test_what_moves_no_score_is_not_in_the_fingerprint(settings, tmp_path):
    first = mark(settings)
    for changes in (
        {"limit": 2},
        {"batch_size": 1},
        {"device": "cpu"},
        {"out": tmp_path / "elsewhere"},
        {"dtype": "float32"},
        {"context": 256},
        {"question": "unseen"},
        {"tasks": "toy_pairs,toy_recall"},
        {"policy": "hoard:size=3"},
        {"prefill": "native"},
    ):
        assert mark(changed(settings, **changes)) == first, changes


def test_what_moves_a_score_is_in_the_fingerprint(settings):
    marks = [mark(settings)]
    for changes in (
        {"budget": "17"},
        {"budget": "25%"},
        {"policy": "hoard:size=4"},
        {"policy": "tova"},
        {"policy": "full", "budget": None},
        {"tasks": "toy_recall"},
        {"context": 300},
        {"question": "seen"},
        {"prefill": "dense"},
        {"chunk": 64},
        {"chat": "off"},
        {"max_new_tokens": "card"},
        {"max_new_tokens": "5"},
        {"seed": 1},
        {"dtype": "bfloat16"},
    ):
        marks.append(mark(changed(settings, **changes)))
    assert len(set(marks)) == len(marks)


def test_the_chunk_is_part_of_a_run_only_where_it_decides_what_is_evicted(settings):
    dense = changed(settings, prefill="dense")
    assert mark(changed(dense, chunk=64)) == mark(dense)
    full = changed(settings, policy="full", budget=None)
    assert mark(changed(full, chunk=64)) == mark(full)


def test_a_policy_file_is_part_of_a_run(settings, tmp_path):
    file = tmp_path / "mine.py"
    text = "from fake_plugins import Hoard\nclass Mine(Hoard):\n    name = 'hoard'\n"
    file.write_text(text)
    first = mark(changed(settings, policy=f"{file}:Mine"))
    assert first != mark(settings)
    file.write_text(text + "    prefill = 'dense'\n")
    assert mark(changed(settings, policy=f"{file}:Mine")) != first


def test_the_command_comes_back_from_its_settings(settings):
    command = changed(settings, limit=2, policy="hoard:name=a b").command()
    assert command == (
        f"evictbench run --policy 'hoard:name=a b' --suite toy --budget 16 --limit 2 --model {settings.model} "
        f"--out {settings.out}"
    )
    assert "--budget" not in settings.command(policy="full", budget=None)
    assert changed(settings, trust_remote_code=True).command().endswith("--trust-remote-code")


def test_phases_are_told(settings):
    phases = []
    make_plan(settings, phases.append)
    assert phases == ["reading the model's config and tokenizer", "making the prompts", "identifying the weights"]
