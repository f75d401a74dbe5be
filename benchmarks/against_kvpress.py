"""Against kvpress: the same model, prompt, budget and policy, each arm in a process of its own, arms taking turns.

    make bench-kvpress                                    # everything, into benchmarks/RESULTS.md
    make bench-kvpress KVPRESS_ARGS="--parts decode,prefill"
    make bench-kvpress KVPRESS_ARGS=--quick               # short prompts, to see that both sides work; nothing is kept

A section is written as soon as its part is measured. H2O's prefill (some 140 s a time in kvpress) and the whole
evaluation (some 8 minutes a time there) are repeated less often than the rest.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.sections import RESULTS, goal, replace_section, table
from benchmarks.serving import Answer, ArmProcess

ROOT = Path(__file__).parent.parent

POLICIES = ("streaming_llm", "tova")

TASKS = "niah_single_1,niah_single_2,vt,fwe"
"""The tasks of RULER that need no data."""

PARTS = ("decode", "prefill", "observed", "evaluation")

NUMBERS = ("prompt", "budget", "interval", "chunk", "rows", "context", "samples", "repeats", "slow_repeats")
"""Options that a section's command repeats where they were changed."""

Rounds = dict[str, list[Answer]]


class Bench:
    """The options, and the files that both sides read."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.ids = folder / "prompt.json"
        numbers = random.Random(0)
        self.ids.write_text(json.dumps([numbers.randrange(1000, 40_000) for _ in range(options.prompt)]))

    @contextmanager
    def ours(self, name: str, policy: str, prefill: str = "native") -> Iterator[ArmProcess]:
        options = self.options
        arguments = ["--prefill", prefill, "--chunk", str(options.chunk), "--rows", str(options.rows)]
        with self._arm(name, sys.executable, "benchmarks.our_arms", policy, arguments) as arm:
            yield arm

    @contextmanager
    def theirs(self, name: str, policy: str) -> Iterator[ArmProcess]:
        from evictbench.models import bundled

        arguments = ["--model", str(bundled.ensure_converted())]
        with self._arm(name, str(self.options.kvpress_python), "benchmarks.kvpress_arms", policy, arguments) as arm:
            self.versions = arm.ask("versions")
            yield arm

    @contextmanager
    def _arm(self, name: str, python: str, module: str, policy: str, arguments: list[str]) -> Iterator[ArmProcess]:
        settings = ["--budget", str(self.options.budget), "--interval", str(self.options.interval)]
        arm = ArmProcess(name, [python, "-m", module, "--policy", policy, *settings, *arguments], ROOT)
        try:
            yield arm
        finally:
            arm.close()

    def write(self, heading: str, part: str, text: str) -> None:
        """Print a section, and write it into the file of results, if there is one."""
        theirs = self.versions
        text = (
            f"kvpress {theirs['kvpress']} with torch {theirs['torch']}, transformers {theirs['transformers']}, "
            f"{theirs['threads']} threads. SmolLM2-135M, float32.\n\n{text}"
        )
        print(f"\n## {heading}\n\n{text}\n", flush=True)
        if self.options.quick:
            print("--quick: it runs; the numbers say nothing about the goals.\n", flush=True)
        if self.options.results:
            replace_section(self.options.results, heading, command(self.options, part), text)


def command(options: argparse.Namespace, part: str) -> str:
    """The command that measures one section again."""
    changed = [f"--parts {part}"]
    if options.quick:
        changed.append("--quick")
    for name in NUMBERS if not options.quick else ():
        if getattr(options, name) != options.defaults[name]:
            changed.append(f"--{name.replace('_', '-')} {getattr(options, name)}")
    return "make bench-kvpress KVPRESS_ARGS=" + shlex.quote(" ".join(changed)).replace("'", '"')


def take_turns(arms: Mapping[str, ArmProcess], repeats: int, do: str, **arguments: Any) -> Rounds:
    """Every arm once, then every arm again."""
    rounds: Rounds = {name: [] for name in arms}
    for number in range(1, repeats + 1):
        for name, arm in arms.items():
            answer = arm.ask(do, **arguments)
            rounds[name].append(answer)
            print(f"  {do} {number}/{repeats}  {name}: {answer['seconds']:.2f} s", file=sys.stderr, flush=True)
    return rounds


def spread(values: list[float], digits: int = 1) -> str:
    """The median, and the lowest and highest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def few(turns: int) -> str:
    """The number of turns of an arm that takes minutes, in words."""
    return "a single turn" if turns == 1 else f"{turns} turns only (lowest to highest)"


def compared(
    rounds: Rounds, above: str, below: str, value: Callable[[Answer], float], wanted: float, *, sign: str = ">="
) -> tuple[str, ...]:
    """Cells of a row: the ratio of two arms' medians, the range of the rounds' ratios, and the goal."""
    numerators, denominators = ([value(answer) for answer in rounds[name]] for name in (above, below))
    ratio = statistics.median(numerators) / statistics.median(denominators)
    ratios = [top / bottom for top, bottom in zip(numerators, denominators, strict=True)]
    return f"{ratio:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}", goal(ratio, sign, wanted)


def seconds(answer: Answer) -> float:
    return float(answer["seconds"])


def rate(answer: Answer) -> float:
    return float(answer["tokens"] / answer["seconds"])


def decode(bench: Bench) -> None:
    """Decode after one interval of warming up, in whole intervals: kvpress' cut falls at the end of each."""
    options = bench.options
    with ExitStack() as stack:
        arms: dict[str, ArmProcess] = {}
        for policy in POLICIES:
            arms[policy] = stack.enter_context(bench.ours(policy, policy, "bounded"))
            name = f"kvpress {policy}"
            arms[name] = stack.enter_context(bench.theirs(name, policy))
        peaks = {name: arm.ask("prepare", ids=str(bench.ids))["peak_bytes"] for name, arm in arms.items()}
        rounds = take_turns(arms, options.repeats, "decode")
    for answers in rounds.values():
        for answer in answers:
            answer["tokens"] = answer["steps"]
    measured = [
        [
            name,
            spread([rate(answer) for answer in answers]),
            spread([1000 * seconds(answer) / answer["steps"] for answer in answers]),
            str(answers[-1]["entries"]),
            f"{peaks[name] / 1e6:.0f}",
        ]
        for name, answers in rounds.items()
    ]
    ratios = [[f"{name} / kvpress", *compared(rounds, name, f"kvpress {name}", rate, 1.0)] for name in POLICIES]
    interval = options.interval
    bench.write(
        "Against kvpress: decode",
        "decode",
        f"One row, prompt of {options.prompt:,} tokens, budget {options.budget}. Ours is read bounded and evicts at "
        f"every step; kvpress' DecodingPress (interval {interval}) leaves the prompt whole until its first cut at step "
        f"{interval}, and then swings between {options.budget} entries and {interval - 1} more. After {interval} "
        f"steps to warm up, an arm decodes {interval} in its turn, kvpress' cut among them; medians of "
        f"{options.repeats} turns (lowest to highest).\n\n"
        + table(["arm", "tokens/s", "ms per token", "entries at most", "peak MB before the turns"], measured)
        + "\n\n"
        + table(["tokens/s", "ratio", "in single turns", "goal"], ratios)
        + "\n\nOf StreamingLLM the speed is comparable and the kept set is not: kvpress' cut stores entries in the "
        "order of `topk`, which is unsorted, so that its first four need not stay the sinks; it keeps original "
        "positions, ours re-indexes them as published. Under SDPA kvpress' TOVA computes the last query's attention "
        "again, at a cut only. The peak is that of the process, without the model, from the prompt to the first cut.",
    )


def prefill(bench: Bench) -> None:
    """The prompt, bounded, against kvpress' one pass over all of it."""
    options = bench.options
    with ExitStack() as stack:
        arms: dict[str, ArmProcess] = {}
        for policy in POLICIES:
            arms[policy] = stack.enter_context(bench.ours(policy, policy, "bounded"))
            name = f"kvpress {policy}"
            arms[name] = stack.enter_context(bench.theirs(name, policy))
        rounds = take_turns(arms, options.repeats, "prefill", ids=str(bench.ids))
    ratios = [[f"kvpress / {name}", *compared(rounds, f"kvpress {name}", name, seconds, 1.3)] for name in POLICIES]
    bench.write(
        "Against kvpress: prefill",
        "prefill",
        f"Prompt of {options.prompt:,} tokens, budget {options.budget}, ours bounded in chunks of {options.chunk}; "
        "kvpress reads all of it in one pass of the model without its head, as its pipeline does, under SDPA, and "
        f"cuts each layer to the same number of entries. Medians of {options.repeats} turns (lowest to highest).\n\n"
        + table(["arm", "seconds", "peak MB"], [_prefilled(name, answers) for name, answers in rounds.items()])
        + "\n\n"
        + table(["seconds", "ratio", "in single turns", "goal"], ratios)
        + f"\n\n{PEAK}",
    )


PEAK = "The peak is that of the arm's own process, at its first prompt, without the model."


def observed(bench: Bench) -> None:
    """H2O's prefill against ObservedAttentionPress, which needs eager attention."""
    options = bench.options
    theirs = "kvpress ObservedAttention"
    with ExitStack() as stack:
        arms = {f"h2o {mode}": stack.enter_context(bench.ours(mode, "h2o", mode)) for mode in ("bounded", "native")}
        arms[theirs] = stack.enter_context(bench.theirs(theirs, "h2o"))
        rounds = take_turns(arms, options.slow_repeats, "prefill", ids=str(bench.ids))
    first = {name: answers[:1] for name, answers in rounds.items()}
    goals = {"h2o bounded": 7.0, "h2o native": 3.0}
    ratios = [
        [f"seconds: kvpress / {name}", *compared(rounds, theirs, name, seconds, wanted)]
        for name, wanted in goals.items()
    ]
    for name in goals:
        row = compared(first, name, theirs, lambda answer: float(answer["peak_bytes"]), 1 / 3, sign="<=")
        ratios.append([f"peak: {name} / kvpress", row[0], "", row[2]])
    bench.write(
        "Against kvpress: H2O's prefill",
        "observed",
        f"Prompt of {options.prompt:,} tokens, budget {options.budget}, ours in chunks of {options.chunk}; kvpress' "
        "ObservedAttentionPress in one pass with eager attention, the only one it works with. Its scores are the mean "
        "attention over the queries that see an entry, ours the sum, and half of ours are the most recent. Medians of "
        f"{few(options.slow_repeats)}: one of kvpress takes minutes.\n\n"
        + table(["arm", "seconds", "peak MB"], [_prefilled(name, answers) for name, answers in rounds.items()])
        + "\n\n"
        + table(["", "ratio", "in single turns", "goal"], ratios)
        + f"\n\n{PEAK}",
    )


def _prefilled(name: str, answers: list[Answer]) -> list[str]:
    return [name, spread([seconds(answer) for answer in answers], 2), f"{answers[0]['peak_bytes'] / 1e6:.0f}"]


def evaluation(bench: Bench) -> None:
    """Whole RULER prompts with their answers: rows decoded together, against kvpress' pipeline."""
    options = bench.options
    prompts, lengths = ruler_prompts(bench)
    policy, theirs = "streaming_llm", "kvpress streaming_llm"
    rows: list[list[str]] = []
    ratios: list[list[str]] = []
    with ExitStack() as stack:
        arms = {policy: stack.enter_context(bench.ours(policy, policy))}
        arms[theirs] = stack.enter_context(bench.theirs(theirs, policy))
        for new_tokens, wanted in ((options.long_answer, 2.0), (options.short_answer, 1.4)):
            rounds = take_turns(arms, options.slow_repeats, "evaluate", prompts=str(prompts), new_tokens=new_tokens)
            made = {answer["tokens"] for answers in rounds.values() for answer in answers}
            assert made == {new_tokens * len(lengths)}, f"every arm makes as many tokens, not {made}"
            rows += [
                [
                    name,
                    str(new_tokens),
                    spread([rate(answer) for answer in answers]),
                    spread([seconds(answer) for answer in answers]),
                ]
                for name, answers in rounds.items()
            ]
            ratios.append([f"{new_tokens} new tokens", *compared(rounds, policy, theirs, rate, wanted)])
    bench.write(
        "Against kvpress: a whole evaluation",
        "evaluation",
        f"{len(lengths)} RULER prompts ({TASKS}) of {min(lengths):,} to {max(lengths):,} tokens, the question unseen, "
        f"budget {options.budget}, StreamingLLM; the end of sequence is ignored, so that every answer is as long. "
        f"Ours decodes {options.rows} rows together and evicts at every step. kvpress' own pipeline takes one prompt "
        "after the other, cuts the context to the same budget, and lets the cache grow with the answer (its "
        f"DecodingPress, at its interval of {options.interval}, would cut nothing before the answers end). New tokens "
        "per second of the whole work, prompts included; medians of "
        f"{few(options.slow_repeats)}: one of kvpress takes minutes.\n\n"
        + table(["arm", "new tokens", "tokens/s", "seconds"], rows)
        + "\n\n"
        + table(["tokens/s, ours / kvpress", "ratio", "in single turns", "goal"], ratios),
    )


def ruler_prompts(bench: Bench) -> tuple[Path, list[int]]:
    """The prompts as token ids with the border before the question; the file, and their lengths."""
    from evictbench.evaluation.plan import make_plan
    from evictbench.evaluation.settings import RunSettings

    options = bench.options
    settings = RunSettings(
        policy="streaming_llm",
        budget=str(options.budget),
        suite="ruler",
        tasks=TASKS,
        context=options.context,
        limit=-(-options.samples // len(TASKS.split(","))),
        device="cpu",
        dtype="float32",
        out=bench.folder / "runs",
    )
    prompts = [planned.prompt for planned in make_plan(settings).prompts[: options.samples]]
    samples = [{"ids": list(prompt.ids), "border": prompt.border} for prompt in prompts]
    for prompt in prompts:
        assert prompt.border is not None, "the question is unseen in both"
        assert prompt.border > options.budget, "every context is cut"
    file = bench.folder / "prompts.json"
    file.write_text(json.dumps(samples))
    return file, [len(prompt.ids) for prompt in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against_kvpress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kvpress-python", type=Path, default=ROOT / ".venv-kvpress/bin/python")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ",".join(PARTS))
    parser.add_argument("--prompt", type=int, default=6144, help="tokens of the prompt")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=128, help="steps between two cuts of kvpress")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt in one pass, ours")
    parser.add_argument("--rows", type=int, default=16, help="rows decoded together in the evaluation, ours")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a RULER prompt")
    parser.add_argument("--samples", type=int, default=64, help="RULER prompts")
    parser.add_argument("--repeats", type=int, default=5, help="turns of every arm")
    parser.add_argument("--slow-repeats", type=int, default=2, help="turns in parts observed and evaluation")
    parser.add_argument("--results", type=Path, help="where the sections go (benchmarks/RESULTS.md)")
    parser.add_argument("--quick", action="store_true", help="short prompts, to see that both sides work")
    options = parser.parse_args()
    options.defaults = {name: parser.get_default(name) for name in vars(options)}
    options.long_answer, options.short_answer = 128, 32
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}, there are {', '.join(PARTS)}.")
    if not options.kvpress_python.exists():
        parser.error(f"There is no {options.kvpress_python}: make bench-kvpress makes that environment.")
    if options.quick:
        options.prompt, options.budget, options.interval, options.chunk = 192, 64, 16, 64
        options.samples, options.rows, options.repeats, options.slow_repeats = 4, 4, 2, 1
        options.long_answer, options.short_answer = 6, 3
    elif options.results is None:
        options.results = RESULTS
    measures = {"decode": decode, "prefill": prefill, "observed": observed, "evaluation": evaluation}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        for part in parts:
            measures[part](bench)


if __name__ == "__main__":
    main()
