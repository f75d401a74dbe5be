"""The lm-eval model: the same as lm-eval's own without eviction, different with it, and nothing shared or cut."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance

from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.generation.loglikelihood import Choice, ChoiceScorer
from evictbench.generation.runner import ModelRunner
from evictbench.harness.arguments import generation_settings
from evictbench.harness.model import EvictBenchLM
from evictbench.policies.tova import TOVA
from evictbench.suite import GREEDY, Sampling

TASKS = ["tiny_gen", "tiny_choice"]


def made(folder: Path, **arguments: Any) -> EvictBenchLM:
    return EvictBenchLM(pretrained=str(folder), device="cpu", **{"batch_size": 3, **arguments})


def evaluated(model: Any, manager: Any, **settings: Any) -> dict[str, Any]:
    found = simple_evaluate(
        model=model, tasks=settings.pop("tasks", TASKS), task_manager=manager, bootstrap_iters=0, **settings
    )
    assert found is not None
    return dict(found)


def responses(found: dict[str, Any]) -> dict[str, list[Any]]:
    return {
        task: [line["resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
        for task, lines in found["samples"].items()
    }


@pytest.fixture(scope="module")
def hf(folder: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)


def test_full_cache_is_lm_evals_own_model(folder: Path, manager: Any, hf: Any) -> None:
    """The same texts, and log-likelihoods to 1e-4."""
    ours, theirs = (responses(evaluated(model, manager)) for model in (made(folder), hf))
    assert ours["tiny_gen"] == theirs["tiny_gen"]
    for mine, its in zip(ours["tiny_choice"], theirs["tiny_choice"], strict=True):
        for (own,), (other,) in zip(mine, its, strict=True):
            assert own[0] == pytest.approx(other[0], abs=1e-4)
            assert own[1] == other[1]


def test_chat_template_and_full_cache(folder: Path, manager: Any, hf: Any) -> None:
    settings = {"apply_chat_template": True, "fewshot_as_multiturn": True}
    ours, theirs = (responses(evaluated(model, manager, **settings)) for model in (made(folder), hf))
    assert ours["tiny_gen"] == theirs["tiny_gen"]
    for mine, its in zip(ours["tiny_choice"], theirs["tiny_choice"], strict=True):
        assert [own[0][0] for own in mine] == pytest.approx([other[0][0] for other in its], abs=1e-4)


def test_a_budget_makes_a_difference(folder: Path, manager: Any) -> None:
    full, evicted, wide = (
        responses(evaluated(made(folder, **arguments), manager))
        for arguments in ({}, {"policy": "tova", "budget": 16}, {"policy": "tova", "budget": 400})
    )
    assert evicted["tiny_gen"] != full["tiny_gen"]
    assert evicted["tiny_choice"] != full["tiny_choice"]
    assert wide["tiny_gen"] == full["tiny_gen"]


def test_choices_equal_a_plain_loop(folder: Path) -> None:
    """Shared prompts, more choices than rows, single tokens: as if each were alone with a cache of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 1000, (count,), generator=draw).tolist())

    prompts = [tokens(count) for count in (40, 7, 60)]
    choices = [
        Choice((at, length), prompt, tokens(length)) for at, prompt in enumerate(prompts) for length in (1, 5, 12, 3, 1)
    ]
    scored = list(ChoiceScorer(model, TOVA(), 16, chunk=9, batch_size=3).run(choices))  # type: ignore[arg-type]
    assert len(scored) == len(choices)
    remaining = list(scored)
    for choice in choices:
        cache, at = new_cache(model, TOVA(), 16, prompt_length=len(choice.prompt)), 0
        whole, total, greedy = [*choice.prompt, *choice.continuation], 0.0, True
        with torch.no_grad():
            for stop in [*range(9, len(choice.prompt), 9), *range(len(choice.prompt), len(whole))]:
                ids, positions = torch.tensor([whole[at:stop]]), torch.arange(at, stop)[None]
                logits = model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True).logits
                if stop >= len(choice.prompt):
                    total += float(logits[0, -1].log_softmax(-1)[whole[stop]])
                    greedy = greedy and int(logits[0, -1].argmax()) == whole[stop]
                at = stop
        match = next(
            one for one in remaining if one.key == choice.key and one.logprob == pytest.approx(total, abs=1e-4)
        )
        remaining.remove(match)
        assert match.greedy == greedy
        assert match.occupancy_max <= 16


def test_a_prompt_is_prefilled_once_for_all_its_choices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = made(folder, policy="tova", budget=16)
    prefilled = []
    real = ModelRunner.prefill

    def counted(self: ModelRunner, prompt: Any, border: Any = None) -> Any:
        prefilled.append(prompt)
        return real(self, prompt, border)

    monkeypatch.setattr(ModelRunner, "prefill", counted)
    pairs = [("One context here", f" choice {i}") for i in range(4)] + [("Another", " one"), ("One context here", " e")]
    instances = [Instance("loglikelihood", {}, pair, i, ("t", i, 1)) for i, pair in enumerate(pairs)]
    found = lm.loglikelihood(instances, disable_tqdm=True)
    assert len(found) == 6
    assert len(prefilled) == 2


def test_out_of_memory_halves_the_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("One context here for all", f" choice number {i} of many") for i in range(5)]
    pairs += [("Another context", " one two three"), ("Another context", " four")]
    instances = [Instance("loglikelihood", {}, pair, i, ("t", i, 1)) for i, pair in enumerate(pairs)]
    expected = made(folder, policy="tova", budget=8, batch_size=1).loglikelihood(instances, disable_tqdm=True)
    real = ChoiceScorer.step

    def failing(self: ChoiceScorer, active: Any, cache: Any) -> None:
        if len(active) > 2:
            raise torch.OutOfMemoryError("no room")
        real(self, active, cache)

    monkeypatch.setattr(ChoiceScorer, "step", failing)
    found = made(folder, policy="tova", budget=8, batch_size=4).loglikelihood(instances, disable_tqdm=True)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-4)


def test_two_policies_never_share_a_response_cache(folder: Path, manager: Any, tmp_path: Path) -> None:
    """lm-eval's key knows neither model nor policy: the same path serves one cell only, and serves that one again."""
    path = str(tmp_path / "answers")
    first = made(folder, policy="tova", budget=16)
    expected = responses(evaluated(first, manager, use_cache=path))

    def not_again(*_: Any) -> Any:
        raise AssertionError("answered anew")

    again = made(folder, policy="tova", budget=16)
    again._generator.run = not_again  # type: ignore[method-assign]
    again._scorer.run = not_again  # type: ignore[method-assign]
    cached = responses(evaluated(again, manager, use_cache=path))
    assert cached["tiny_gen"] == expected["tiny_gen"]
    for other in ({"policy": "h2o", "budget": 16}, {"policy": "tova", "budget": 17}, {"policy": "full"}):
        with pytest.raises(UserError, match="its own --use_cache path"):
            evaluated(made(folder, **other), manager, use_cache=path)
    assert responses(evaluated(made(folder), manager)) != expected


def test_a_foreign_response_cache_is_refused(folder: Path, manager: Any, hf: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "answers")
    evaluated(hf, manager, use_cache=path, tasks=["tiny_gen"])
    with pytest.raises(UserError, match="another model, policy or budget"):
        evaluated(made(folder, policy="tova", budget=16), manager, use_cache=path)


def test_what_does_not_fit_is_refused_before_anything_runs(folder: Path, manager: Any) -> None:
    lm = made(folder, policy="tova", budget=16, max_length=60)
    with pytest.raises(UserError, match="nothing is cut silently"):
        evaluated(lm, manager, tasks=["tiny_gen"])
    with pytest.raises(UserError, match="nothing is cut silently"):
        evaluated(lm, manager, tasks=["tiny_choice"])


def test_rolling_and_empty_contexts_are_refused(folder: Path, manager: Any) -> None:
    lm = made(folder, policy="tova", budget=16)
    with pytest.raises(UserError, match="fidelity"):
        evaluated(lm, manager, tasks=["tiny_rolling"])
    with pytest.raises(UserError, match="empty context"):
        lm.loglikelihood([Instance("loglikelihood", {}, ("", " word"), 0, ("t", 0, 1))])


def test_model_arguments_as_lm_eval_reads_them(folder: Path) -> None:
    """Commas separate arguments, so settings of a policy are separated by semicolons."""
    lm = EvictBenchLM.create_from_arg_string(
        f"pretrained={folder},policy=snapkv:window=8;kernel=3,budget=24,chunk=32",
        {"batch_size": 2, "max_batch_size": None, "device": "cuda:0"},
    )
    assert lm.fingerprint["policy"]["settings"]["window"] == 8  # type: ignore[index]
    assert lm.fingerprint["policy"]["settings"]["kernel"] == 3  # type: ignore[index]
    assert lm._generator.batch_size == 2
    own = EvictBenchLM.create_from_arg_obj({"pretrained": str(folder), "batch_size": 5}, {"batch_size": 1})
    assert own._generator.batch_size == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"policy": "h20", "budget": 16}, "did you mean h2o"),
        ({"policy": "tova"}, "needs a budget"),
        ({"policy": "full", "budget": 16}, "takes no budget"),
        ({"policy": "h2o", "budget": 0}, "udget"),
        ({"polcy": "h2o"}, "did you mean policy"),
        ({"prefill": "sparse"}, "native"),
        ({"thinking": "maybe"}, "auto"),
        ({"policy": "streaming_llm", "budget": 3}, "at least"),
    ],
)
def test_bad_arguments_are_sentences(folder: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        made(folder, **arguments)


def test_generation_settings() -> None:
    assert generation_settings({"until": "\n", "max_gen_toks": 9}, "t") == (GREEDY, 9, ("\n",))
    assert generation_settings({}, "t")[1] == 256
    sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "until": ["a", ""]}
    assert generation_settings(sampled, "t") == (Sampling(0.6, 0.95, 20), 256, ("a",))
    assert generation_settings({"do_sample": True}, "t")[0] == Sampling(temperature=1.0)
    assert generation_settings({"do_sample": False, "temperature": 0.6}, "t")[0] == GREEDY
    assert generation_settings({"temperature": 0.6}, "t")[0] == Sampling(temperature=0.6)
    assert generation_settings({"num_beams": 1}, "t")[0] == GREEDY
    with pytest.raises(UserError, match="num_beams=4"):
        generation_settings({"num_beams": 4}, "t")


def test_sampled_answers_repeat_and_differ(folder: Path) -> None:
    lm = made(folder, policy="tova", budget=16)
    settings = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8}
    one = Instance("generate_until", {}, ("A short prompt", settings), 0, ("t", 0, 3))
    first = lm.generate_until([one] * 3, disable_tqdm=True)
    assert len(set(first)) == 3
    assert made(folder, policy="tova", budget=16).generate_until([one] * 3, disable_tqdm=True) == first


def test_command_line(folder: Path, task_folder: Path) -> None:
    """lm-eval's own command line finds the model; bad input is one line and exit code 2."""
    words = [
        sys.executable,
        "-m",
        "evictbench.harness.cli",
        "--model",
        "evictbench",
        "--include_path",
        str(task_folder),
    ]
    words += ["--tasks", str(task_folder / "tiny_choice.yaml")]
    good = [*words, "--model_args", f"pretrained={folder},policy=snapkv:window=8;kernel=3,budget=24"]
    done = subprocess.run(good, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "acc_norm" in done.stdout
    bad = [*words, "--model_args", f"pretrained={folder},policy=h20,budget=24"]
    done = subprocess.run(bad, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: Unknown policy 'h20'")
