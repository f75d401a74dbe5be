"""The run loop on fakes: what is written, resumed, extended, refused, interrupted."""

import dataclasses
import json

import pytest
from fake_plugins import FakeGenerator, make_model

from evictbench import registry
from evictbench.cache.rows import RecencyCount
from evictbench.errors import NotFinite, RunFailed, UserError
from evictbench.evaluation import tasks
from evictbench.evaluation.plan import make_plan
from evictbench.evaluation.run import load_model, run
from evictbench.evaluation.settings import RunSettings
from evictbench.generation.generator import Completion
from evictbench.models import load
from evictbench.models.loaded_weights import UnusedTensors
from evictbench.store import run_folder
from evictbench.suite import Protocol, Sampling


class Watch:
    def __init__(self, stop_after=None):
        self.warnings = []
        self.lines = []
        self.finished = None
        self.stop_after = stop_after

    def phase(self, text):
        pass

    def planned(self, plan, finished):
        self.finished = finished

    def warn(self, sentence):
        self.warnings.append(sentence)

    def start(self, finished, total):
        self.total = total

    def sample(self, line):
        self.lines.append(line)
        if self.stop_after is not None and len(self.lines) == self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", weights=False)


@pytest.fixture
def settings(model, tmp_path):
    return RunSettings(policy="hoard", suite="toy", budget="16", model=str(model), out=tmp_path / "runs")


def go(settings, watch=None, device="cpu", **fake):
    """Run with the fake generator; gives the outcome, the watcher and the requests that were made."""
    watch = watch or Watch()
    seen = fake.pop("seen", [])
    outcome = run(settings, watch, lambda plan: (FakeGenerator(plan.tokenizer, seen=seen, **fake), device))
    return outcome, watch, seen


WARM = Sampling(temperature=0.6)


@pytest.fixture
def sampled(settings, monkeypatch):
    """The toy suite, sampled four times."""
    preset = Protocol(source="a card", tasks=("toy_recall", "toy_pairs"), sampling=WARM, repeats=4)
    suite = dataclasses.replace(registry.load_suite("toy"), protocols={"default": preset})
    monkeypatch.setattr(registry, "load_suite", lambda name: suite)
    return settings


class Lucky(FakeGenerator):
    """Right on three documents of four in the first two repeats, and on none afterwards; its answers repeat."""

    def answer(self, request):
        done = super().answer(request)
        _, doc_id, repeat = request.key
        words = self.tokenizer.decode(request.prompt).split("Remember this. ")[1].split(" Blue")[0]
        return dataclasses.replace(done, text=f" {words}" if doc_id < 3 and repeat < 2 else " no idea")


def essence(folder):
    return {
        key: (line["prompt_hash"], line["tokens"], line["score"], line["text"])
        for key, line in run_folder.read_samples(folder).items()
    }


def test_a_run_writes_every_sample_and_a_summary(settings):
    outcome, watch, seen = go(settings)
    folder = outcome.plan.folder
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "run.json", "samples.jsonl", "summary.json"]
    samples = run_folder.read_samples(folder)
    assert set(samples) == {(task, i, 0) for task in ("toy_recall", "toy_pairs") for i in range(4)}
    assert len(watch.lines) == len(seen) == 8
    line = samples["toy_pairs", 1, 0]
    assert line["output_tokens"] == len(line["tokens"])
    assert line["session"] == 0
    assert line["token_limit"] == 20
    request = next(one for one in seen if one.key == ("toy_pairs", 1, 0))
    assert run_folder.prompt_ids(line) == request.prompt
    assert (line["prompt_tokens"], line["border"]) == (len(request.prompt), request.border)
    assert line["prompt_hash"] == run_folder.hash_ids(request.prompt)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == json.loads(json.dumps(outcome.summary))
    assert summary["skipped"] == {"toy_songs": "no songs in --data-dir."}
    for task, row in summary["tasks"].items():
        scores = [line["score"] for key, line in samples.items() if key[0] == task]
        assert row["score"] == pytest.approx(sum(scores) / 4)
        assert row["samples"] == row["asked"] == 4
    assert summary["mean"]["score"] == pytest.approx(sum(row["score"] for row in summary["tasks"].values()) / 2)
    assert 0 < summary["mean"]["score"] < 1


def test_d5_what_is_needed_to_run_it_again_is_written(settings):
    outcome, _, _ = go(settings)
    written = run_folder.read_run(outcome.plan.folder)
    identity, session = written["identity"], written["sessions"][0]
    assert identity["policy"]["settings"] == outcome.plan.checked.chosen.settings
    assert identity["weights"].startswith("sha256:")
    assert identity["dtype"] == "float32"
    assert identity["seed"] == 0
    assert identity["data"] == dict(outcome.plan.prepared.data)
    assert identity["tasks"] == {"toy_recall": "1.0", "toy_pairs": "2.0"}
    assert identity["protocol"]["question"] == "unseen"
    assert {"python", "torch", "transformers", "lm-eval", "commit", "device", "batch_size"} <= session.keys()


def test_d1_to_d4_each_number_lands_in_its_own_column(settings):
    """Prefill is not counted as decode, the first token is in neither rate, cache and prefill peak stay apart."""
    outcome, _, _ = go(settings)
    row = outcome.summary["tasks"]["toy_pairs"]
    lines = [line for line in run_folder.read_samples(outcome.plan.folder).values() if line["task"] == "toy_pairs"]
    assert row["prefill_seconds"] == 0.25
    assert row["first_token_seconds"] == 0.3
    assert row["decode_seconds"] == 0.5
    assert row["cache_bytes"] == 2000
    assert row["prefill_peak_bytes"] == 5_000_000
    assert row["decode_tokens_per_second"] == pytest.approx(sum(line["decode_steps"] for line in lines) / (4 * 0.5))


def test_what_is_finished_is_not_run_again(settings):
    first, _, _ = go(settings)
    before = (first.plan.folder / "samples.jsonl").read_bytes()
    loaded = []
    watch = Watch()
    again = run(settings, watch, lambda plan: loaded.append(plan))
    assert loaded == []  # the weights are not even loaded
    assert watch.finished == 8
    assert again.summary == first.summary
    assert (first.plan.folder / "samples.jsonl").read_bytes() == before
    assert len(run_folder.read_run(first.plan.folder)["sessions"]) == 1


def test_a_larger_limit_extends(settings):
    first, _, _ = go(dataclasses.replace(settings, limit=2))
    second, _, seen = go(dataclasses.replace(settings, limit=5))
    assert second.plan.folder == first.plan.folder
    assert {request.key[1] for request in seen} == {2, 3, 4}
    whole, _, _ = go(dataclasses.replace(settings, limit=5, out=settings.out / "whole"))
    assert essence(second.plan.folder) == essence(whole.plan.folder)
    assert second.summary["tasks"] == whole.summary["tasks"]


def test_a_smaller_limit_afterwards_still_shows_all_there_is(settings):
    go(settings)
    outcome, _, seen = go(dataclasses.replace(settings, limit=1))
    assert seen == []
    assert outcome.summary["tasks"]["toy_recall"]["samples"] == 4


def test_ctrl_c_keeps_every_finished_sample_and_the_rest_comes_later(settings):
    stopped, _, _ = go(settings, Watch(stop_after=5))
    assert stopped.interrupted
    assert len(run_folder.read_samples(stopped.plan.folder)) == 5
    assert stopped.summary["mean"]["samples"] == 5
    assert json.loads((stopped.plan.folder / "summary.json").read_text())["mean"]["samples"] == 5
    going_on, _, seen = go(settings)
    assert not going_on.interrupted
    assert len(seen) == 3
    whole, _, _ = go(dataclasses.replace(settings, out=settings.out / "whole"))
    assert essence(going_on.plan.folder) == essence(whole.plan.folder)


def test_a_failure_in_mid_run_keeps_what_is_finished(settings):
    with pytest.raises(RuntimeError, match="caught fire"):
        go(settings, fail_at=4)
    outcome, watch, seen = go(settings)
    assert watch.finished == 3  # answers come in threes
    assert len(seen) == 5
    assert len(run_folder.read_samples(outcome.plan.folder)) == 8


def test_more_entries_than_the_budget_fails_the_run(settings):
    with pytest.raises(RunFailed) as failure:
        go(settings, occupancy=17)
    sentence = str(failure.value)
    assert "hoard let a decode query see 17 entries where the budget allows 16" in sentence
    assert "\n" not in sentence


def test_logits_that_are_not_finite_name_the_sample_and_keep_the_finished(settings):
    class Failing(FakeGenerator):
        def run(self, requests):
            requests = list(requests)
            yield from super().run(requests[:3])
            raise NotFinite(requests[3].key, 7)

    with pytest.raises(RunFailed) as failure:
        run(settings, Watch(), lambda plan: (Failing(plan.tokenizer), "cpu"))
    sentence = str(failure.value)
    assert "under hoard gave logits that are not finite, NaN or infinite, after 7 tokens of an answer" in sentence
    assert "(toy_pairs, sample 1, repeat 0)" in sentence
    assert "3 finished samples are in" in sentence
    assert "\n" not in sentence
    _, watch, _ = go(settings)
    assert watch.finished == 3


def test_left_over_weights_are_warned_of_and_in_the_record(settings, monkeypatch):
    unused = UnusedTensors(7, ("vision.tower.weight",))
    monkeypatch.setattr(load, "unused_tensors", lambda source: unused)
    outcome, watch, _ = go(settings)
    assert watch.warnings == [unused.sentence]
    assert outcome.summary["warnings"] == [unused.sentence]
    record = json.loads((outcome.plan.folder / run_folder.RUN).read_text())
    assert [session["unused_weights"] for session in record["sessions"]] == [
        {"count": 7, "first": ["vision.tower.weight"]}
    ]


def test_a_model_that_changes_after_the_plan_is_not_run(settings, monkeypatch):
    planned = make_plan(settings)
    monkeypatch.setattr(load, "load_model", lambda *_: None)
    load_model(planned)
    monkeypatch.setattr(load, "weights_hash", lambda *_: "sha256:other")
    with pytest.raises(UserError, match="The files of tiny were changed since this run was planned"):
        load_model(planned)


def test_a14_occupancy_is_what_was_measured_and_finished_samples_stay(settings):
    outcome, _, _ = go(dataclasses.replace(settings, limit=1), occupancy=16)
    assert outcome.summary["mean"]["occupancy_max"] == 16
    assert outcome.summary["mean"]["occupancy_mean"] == 15.5
    with pytest.raises(RunFailed, match="2 finished samples are in"):
        go(settings, occupancy=17)
    assert len(run_folder.read_samples(outcome.plan.folder)) == 2


def test_a_policy_that_says_it_does_not_enforce_is_not_held_to_its_budget(settings, monkeypatch):
    from fake_plugins import Hoard

    monkeypatch.setattr(Hoard, "enforces_budget", False)
    outcome, _, _ = go(settings, occupancy=1000)
    assert outcome.summary["mean"]["occupancy_max"] == 1000


def test_a_share_of_the_text_is_guarded_as_such(settings):
    half = dataclasses.replace(settings, budget="50%", tasks="toy_recall", limit=1)
    outcome, _, seen = go(half, occupancy=32)
    request = seen[0]
    answered = len(run_folder.read_samples(outcome.plan.folder)["toy_recall", 0, 0]["tokens"])
    allowed = max(32, max(request.border, len(request.prompt) + answered) // 2)
    go(dataclasses.replace(half, out=half.out / "at"), occupancy=allowed)
    with pytest.raises(RunFailed, match=f"the budget allows {allowed} "):
        go(dataclasses.replace(half, out=half.out / "over"), occupancy=allowed + 1)


def test_full_is_held_to_nothing(settings):
    outcome, _, _ = go(dataclasses.replace(settings, policy="full", budget=None), occupancy=10_000)
    assert outcome.summary["mean"]["occupancy_max"] == 10_000
    assert "full-none-" in outcome.plan.folder.name


def test_another_batch_size_or_device_goes_on_with_a_warning(settings):
    go(dataclasses.replace(settings, limit=1))
    _, watch, _ = go(dataclasses.replace(settings, batch_size=2), device="cuda: Imaginary")
    assert any("batch_size 8, these with 2" in sentence for sentence in watch.warnings)
    assert any("device cpu, these with cuda: Imaginary" in sentence for sentence in watch.warnings)


def test_what_a_suite_says_of_its_data_is_warned_of_and_written(settings, monkeypatch):
    suite = registry.load_suite("toy")
    sentence = "2 of the 6 documents of toys are missing."
    half = dataclasses.replace(
        suite, prepare=lambda request: dataclasses.replace(suite.prepare(request), warnings=(sentence,))
    )
    monkeypatch.setattr(registry, "load_suite", lambda name: half)
    outcome, watch, _ = go(settings)
    assert sentence in watch.warnings
    assert sentence in outcome.summary["warnings"]


def test_what_a_policy_doubts_under_its_budget_is_warned_of_and_written(settings, monkeypatch):
    chosen = registry.parse_policy(settings.policy).policy
    monkeypatch.setattr(chosen, "doubts", lambda self, budget: (f"Trained for other than {budget}.",))
    outcome, watch, _ = go(settings)
    assert f"Trained for other than {settings.budget}." in watch.warnings
    assert outcome.summary["warnings"] == watch.warnings


def test_b4_shortened_answers_are_warned_of_and_written(settings):
    outcome, watch, _ = go(dataclasses.replace(settings, max_new_tokens="5"))
    assert any("4 of 4 answers of toy_pairs may be shorter than its card allows" in text for text in watch.warnings)
    assert outcome.summary["answers_cut"] == {"toy_recall": 4, "toy_pairs": 4}
    assert outcome.summary["warnings"] == watch.warnings
    assert {line["token_limit"] for line in run_folder.read_samples(outcome.plan.folder).values()} == {5}
    plain, quiet, _ = go(settings)
    assert quiet.warnings == []
    assert plain.summary["answers_cut"] == {}


def test_samples_of_other_prompts_are_not_mixed_in(settings, monkeypatch):
    outcome, _, _ = go(dataclasses.replace(settings, limit=1))
    render = tasks.render
    monkeypatch.setattr(tasks, "render", lambda *given, **named: render(*given, **named) + " indeed")
    with pytest.raises(UserError, match="holds samples of other prompts than this command makes") as refusal:
        go(settings)
    assert str(outcome.plan.folder) in str(refusal.value)


def test_b10_an_answer_of_no_tokens_is_a_sample_like_any_other(settings):
    class Silent(FakeGenerator):
        def answer(self, request):
            nothing = {"tokens": (), "text": "", "truncated": False, "decode_steps": 0, "decode_seconds": 0.0}
            return dataclasses.replace(super().answer(request), occupancy_max=0, occupancy_mean=0.0, **nothing)

    outcome = run(settings, Watch(), lambda plan: (Silent(plan.tokenizer), "cpu"))
    assert outcome.summary["mean"]["score"] == 0.0
    assert outcome.summary["mean"]["output_tokens"] == 0
    assert outcome.summary["mean"]["decode_tokens_per_second"] is None


def test_a_full_cache_that_says_nothing_is_remarked_upon_in_its_run_and_in_those_beside_it(settings):
    class Silent(FakeGenerator):
        def answer(self, request):
            return dataclasses.replace(super().answer(request), tokens=(), text="", decode_steps=0)

    settings = dataclasses.replace(settings, tasks="toy_recall", limit=10)
    full = dataclasses.replace(settings, policy="full", budget=None)
    sentence = "toy_recall: 10 of 10 answers of the full cache are wrong and at most one token long"
    outcome, watch, _ = go(settings)
    assert not outcome.summary["warnings"]
    watch = Watch()
    outcome = run(full, watch, lambda plan: (Silent(plan.tokenizer), "cpu"))
    (found,) = watch.warnings
    assert found.startswith(sentence)
    assert outcome.summary["warnings"] == [found]
    outcome, watch, _ = go(settings)
    assert watch.warnings == outcome.summary["warnings"] == [found]
    outcome, watch, _ = go(dataclasses.replace(settings, seed=1))
    assert not watch.warnings  # the full cache has not answered these prompts


def test_very_long_prompts_keep_their_hash_only(settings, monkeypatch):
    monkeypatch.setattr("evictbench.store.run_folder.MOST_IDS", 80)
    outcome, _, _ = go(settings)
    lines = list(run_folder.read_samples(outcome.plan.folder).values())
    assert {line["prompt_ids"] is None for line in lines} == {True, False}
    assert all((line["prompt_ids"] is None) == (line["prompt_tokens"] > 80) for line in lines)
    assert all(line["prompt_hash"] for line in lines)


def test_each_document_is_answered_as_often_as_the_protocol_says(sampled):
    outcome, _, seen = go(sampled)
    keys = {(task, i, repeat) for task in ("toy_recall", "toy_pairs") for i in range(4) for repeat in range(4)}
    assert set(run_folder.read_samples(outcome.plan.folder)) == {request.key for request in seen} == keys
    assert {request.sampling for request in seen} == {WARM}
    assert len({request.draw for request in seen}) == len(seen) == 32
    assert {request.draw[1] for request in seen} == {0, 1, 2, 3}
    row = outcome.summary["tasks"]["toy_pairs"]
    assert (row["samples"], row["asked"], row["documents"], row["repeats"], row["k"]) == (16, 16, 4, 4, 4)


def test_a_larger_repeats_extends_and_a_smaller_one_shows_all_there_is(sampled):
    first, _, _ = go(dataclasses.replace(sampled, repeats=2))
    assert first.summary["differs"] == {"repeats": {"used": 2, "protocol": 4}}
    second, _, seen = go(sampled)
    assert second.plan.folder == first.plan.folder
    assert {request.key[2] for request in seen} == {2, 3}
    whole, _, _ = go(dataclasses.replace(sampled, out=sampled.out / "whole"))
    assert essence(second.plan.folder) == essence(whole.plan.folder)
    assert second.summary["tasks"] == whole.summary["tasks"]
    third, _, seen = go(dataclasses.replace(sampled, repeats=1))
    assert seen == []
    assert third.summary["tasks"] == second.summary["tasks"]


def test_a_sampled_run_that_was_stopped_goes_on_as_it_began(sampled):
    stopped, _, _ = go(sampled, Watch(stop_after=13))
    assert stopped.interrupted
    assert stopped.summary["tasks"]["toy_pairs"]["repeats"] == 1  # what every document has
    going_on, _, seen = go(sampled)
    assert len(seen) == 32 - 13
    whole, _, every = go(dataclasses.replace(sampled, out=sampled.out / "whole"))
    draws = {request.key: request.draw for request in every}
    assert all(draws[request.key] == request.draw for request in seen)
    assert going_on.summary["tasks"] == whole.summary["tasks"]


def test_c7_scores_over_repeats(sampled, monkeypatch):
    """The mean over documents of each one's mean; the best of k without bias; the majority with ties to the first."""
    score = tasks.score
    monkeypatch.setattr(
        tasks, "score", lambda task, doc_id, text: dataclasses.replace(score(task, doc_id, text), answer=text.strip())
    )
    outcome = run(sampled, Watch(), lambda plan: (Lucky(plan.tokenizer), "cpu"))
    row = outcome.summary["tasks"]["toy_recall"]
    assert row["score"] == pytest.approx(3 / 8)
    assert (row["k"], row["pass_at_k"]) == (4, 0.75)
    assert row["maj_at_k"] == 0.75  # two against two: the first
    low, high = row["interval"]
    assert low < 3 / 8 - 0.2  # four documents, and not sixteen samples
    assert high > 3 / 8 + 0.2
    again = run(dataclasses.replace(sampled, at=2), Watch(), lambda plan: (_ for _ in ()).throw(AssertionError))
    row = again.summary["tasks"]["toy_recall"]
    assert row["score"] == pytest.approx(3 / 8)
    assert (row["k"], row["pass_at_k"]) == (2, pytest.approx(0.75 * (1 - 1 / 6)))  # 2 right of 4: 1 - C(2,2)/C(4,2)
    mean = again.summary["mean"]
    assert (mean["k"], mean["repeats"], mean["documents"], mean["samples"]) == (2, 4, 8, 32)


def test_prompts_beyond_the_window_are_left_out_counted_and_shown(model, settings, tmp_path):
    lengths = sorted({len(planned.prompt.ids) for planned in make_plan(settings).prompts})
    folder = make_model(tmp_path / "short", weights=False, window=lengths[-1] + 12)
    short = dataclasses.replace(settings, model=str(folder), context=None, max_new_tokens="card", limit=7)
    short = dataclasses.replace(short, context=100)
    with pytest.raises(UserError, match="--skip-overlong leaves such samples out"):
        go(short)
    outcome, watch, seen = go(dataclasses.replace(short, skip_overlong=True))
    overlong = outcome.summary["overlong"]
    assert set(overlong) == {"toy_pairs"}
    count = len(overlong["toy_pairs"])
    assert 0 < count < 7
    assert len(seen) == 14 - count
    assert not {("toy_pairs", doc_id, 0) for doc_id in overlong["toy_pairs"]} & {request.key for request in seen}
    (sentence,) = watch.warnings
    assert f"{count} of 7 prompts of toy_pairs do not fit the window of short" in sentence
    assert outcome.summary["warnings"] == [sentence]
    assert outcome.summary["tasks"]["toy_pairs"]["asked"] == 7 - count
    folder = make_model(tmp_path / "shorter", weights=False, window=20)
    with pytest.raises(UserError, match="nothing is left to run"):
        go(dataclasses.replace(short, model=str(folder), context=20, skip_overlong=True))


def test_a_suite_may_bring_a_generator_that_grades_for_itself(settings, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Measured(Completion):
        score: float = 0.0
        metrics: dict = dataclasses.field(default_factory=dict)

    class Measurer(FakeGenerator):
        device = "cpu: measured"

        def answer(self, request):
            known = vars(super().answer(request)) | {"text": "<think> no task reads this"}
            return Measured(**known, score=0.5 + request.key[1] / 8, metrics={"kl": 2.0 + request.key[1]})

    toy = registry.load_suite("toy")
    suite = dataclasses.replace(toy, generator=lambda plan, load: Measurer(plan.tokenizer))
    monkeypatch.setattr(registry, "load_suite", lambda name: suite)
    monkeypatch.setattr(tasks, "score", None)
    outcome = run(settings, Watch())
    line = run_folder.read_samples(outcome.plan.folder)["toy_pairs", 2, 0]
    assert (line["score"], line["metrics"], line["answer"], line["thinking"]) == (0.75, {"kl": 4.0}, None, "none")
    assert run_folder.read_run(outcome.plan.folder)["sessions"][0]["device"] == "cpu: measured"
    metric = outcome.summary["tasks"]["toy_pairs"]["metrics"]["kl"]
    assert metric["mean"] == 3.5
    assert metric["interval"][0] < 3.5 < metric["interval"][1]
    mean = outcome.summary["mean"]["metrics"]["kl"]
    assert mean["mean"] == 3.5
    assert mean["interval"][0] == pytest.approx(3.5 - (3.5 - metric["interval"][0]) / 2**0.5)  # two tasks alike


class Recent(FakeGenerator):
    """Its answers were looked at at two moments, of which one head kept something at both and one never did; the
    answer to the first document had no step."""

    def answer(self, request):
        import torch

        inside = torch.tensor([[1.0, 0.0], [0.5, 0.0]], dtype=torch.float64)
        counts = torch.tensor([[2.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
        count = RecencyCount(40, 2, inside, counts) if request.key[1] else None
        return dataclasses.replace(super().answer(request), recency=count)


def test_recency_is_in_the_lines_and_in_no_fingerprint(settings):
    plain, _, _ = go(dataclasses.replace(settings, limit=1))
    asked = dataclasses.replace(settings, limit=2, recency="same")
    watch = Watch()
    outcome = run(asked, watch, lambda plan: (Recent(plan.tokenizer), "cpu"))
    assert outcome.plan.folder == plain.plan.folder
    lines = run_folder.read_samples(outcome.plan.folder)
    measured = {key: line["recency"] for key, line in lines.items() if "recency" in line}
    assert {doc_id for _, doc_id, _ in measured} == {1}
    for key, record in measured.items():
        assert record["by_layer"] == [0.5, 0.25]
        assert (record["share"], record["moments"], record["window"], record["every"]) == (0.375, 2, "same", 32)
        assert lines[key]["recency_by_head"] == [[0.5, None], [0.25, None]]
    (sentence,) = [sentence for sentence in watch.warnings if "inside the window" in sentence]
    assert sentence.startswith("2 of 4 samples have no share of kept entries inside the window same")
    assert "--recency same" in asked.command()
