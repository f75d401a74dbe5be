"""`python -m benchmarks.gpu_check [--device cpu --tiny]`: checks that need a GPU, in under four minutes on an H200.

Needs torch and transformers (psutil and rich too, which come with them), no network, no weights and no installation:
run it in a checkout. First every policy on a
small model in float32, against the CPU. Then the shape of Qwen3-8B with random weights in bfloat16: decode steps at
8,192, 32,768 and 131,072 tokens seen, one row and four, over caches filled with random entries; and prompts of 32,768
tokens that are read in chunks. A step ends when the host knows the next tokens. "Recorded" is the same step as a CUDA
graph; the full cache grows, so that its graph repeats one step. Contenders take turns, medians of five runs; what
cannot fit, or what the time limit cut off, is a line of the table. --tiny: a small model and short texts, only to see
that it runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu_decode import Bench, Contender, DecodeArm, Line, top_kernels
from benchmarks.gpu_equality import BUDGET, WINDOW, Equality, compare, small_model
from benchmarks.random_entries import filled
from benchmarks.random_policies import names, policy_for
from benchmarks.recorded_step import cuda_graph
from benchmarks.sections import RESULTS, goal, replace_section, table
from benchmarks.steps import NONE, Oldest
from evictbench.cache.paged import attention
from evictbench.errors import UserError
from evictbench.generation.runner import ModelRunner
from evictbench.models import random_models
from evictbench.policy.budget import Budget
from evictbench.trace.cell import read_weight_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPE = "shape:qwen3-8b"
FULL, KVPOP, DMS_MEAN, DMS_SHARE = "full", "kvpop", "dms, equal mean", "dms, 25%"
SCORED = ("streaming_llm", "h2o", KVPOP)
EVICTED = (*SCORED, DMS_MEAN)
LIMIT = 220.0
"""Seconds after which nothing new is begun; a measurement under way ends well within four minutes."""


class Plan:
    """Sizes: those of the real check, or tiny ones."""

    def __init__(self, tiny: bool) -> None:
        self.budget = BUDGET if tiny else 4096
        self.window = WINDOW if tiny else 256
        self.lengths = (192, 384, 768) if tiny else (8192, 32_768, 131_072)
        self.rows = (1, 2) if tiny else (1, 4)
        self.prompt = 384 if tiny else 32_768
        self.chunk = 96 if tiny else 2048
        self.runs, self.steps = (1, 2) if tiny else (5, 4)
        self.equality = ((200, 150), 6) if tiny else ((320, 200), 40)


def contenders(model: PreTrainedModel, plan: Plan) -> list[Contender]:
    """Full, no policy, and the policies, all at one budget; DMS also at a share."""
    budget = Budget(tokens=plan.budget)

    def under(name: str, budget: Budget | None, label: str | None = None) -> Contender:
        return Contender(label or name, policy_for(name, model.config, plan.window), budget)

    return [
        under(FULL, None),
        Contender(NONE, Oldest(), budget),
        *(under(name, budget) for name in SCORED),
        under("dms", budget, DMS_MEAN),
        under("dms", Budget(share=0.25), DMS_SHARE),
    ]


def goals(
    lines: Sequence[Line], equalities: Sequence[Equality], plan: Plan, prompts: Sequence[Line] = ()
) -> list[list[str]]:
    """Rows of the table of goals: each value beside what it must reach; "not measured" counts as missed."""
    at = {(line.name, line.seen, line.rows): line for line in lines}
    few, many = plan.rows
    short, longest = plan.lengths[0], plan.lengths[-1]
    equal, compared = sum(equality.equal for equality in equalities), len(equalities)
    rows = [["policies equal to the CPU's", f"{equal} of {compared}", _verdict(equal == compared > 0)]]
    for name in EVICTED:
        ends = [at.get((name, seen, few)) for seen in (short, longest)]
        for field, title in (("cache_bytes", "cache"), ("own_bytes", "most memory")):
            sizes = [getattr(line, field) for line in ends if line is not None and getattr(line, field)]
            value = sizes[1] / sizes[0] if len(sizes) == 2 else None
            rows.append(_row(f"{name}: {title} at {longest:,} over {short:,} tokens, {few} row", value, 1.01))
    for rows_here, wanted in ((many, 0.35), (few, 0.6)):
        rows += _ratios(at, KVPOP, FULL, longest, rows_here, wanted)
    for name in EVICTED:
        for rows_here in plan.rows:
            rows += _ratios(at, name, NONE, longest, rows_here, 1.1)
    by_name = {line.name: line for line in prompts}
    for name in SCORED:
        value = _over(_field(by_name.get(name), "read_seconds"), _field(by_name.get(FULL), "read_seconds"))
        shown = "not measured" if value is None else f"{value:.3f}"
        rows.append([f"{name}: a prompt of {plan.prompt:,} tokens over full", shown, "reported"])
    return rows


def _ratios(
    at: dict[tuple[str, int, int], Line], name: str, base: str, seen: int, rows: int, wanted: float
) -> list[list[str]]:
    """One contender's step over another's, as it is and recorded."""
    fields = [("seconds", "step"), ("recorded", "recorded step")]
    if name == DMS_MEAN:  # pages change hands: there is nothing to record
        del fields[1]
    table_rows = []
    for field, title in fields:
        value = _over(*(_field(at.get((contender, seen, rows)), field) for contender in (name, base)))
        title = f"{name}: {title} over {base}, {seen:,} tokens, {rows} row{'s' * (rows > 1)}"
        table_rows.append(_row(title, value, wanted))
    return table_rows


def _field(line: Line | None, name: str) -> float | None:
    return None if line is None else getattr(line, name)


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _row(title: str, value: float | None, wanted: float) -> list[str]:
    if value is None:
        return [title, "not measured", f"<= {wanted:g}: missed"]
    return [title, f"{value:.3f}", goal(value, "<=", wanted)]


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


HEAD = [
    "",
    "tokens seen",
    "rows",
    "entries held",
    "step ms",
    "recorded ms",
    "tokens/s",
    "cache GiB",
    "with weights GiB",
]


def shown(line: Line, weights: int) -> list[str]:
    """A row of the table of steps."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    fastest = min((value for value in (line.seconds, line.recorded) if value), default=None)
    own = None if line.own_bytes is None else (line.own_bytes + weights) / 2**30
    note = line.note if line.read_seconds is None else f"{line.note} in {line.read_seconds:.2f} s"
    return [
        line.name,
        f"{line.seen:,}",
        str(line.rows),
        number(line.held, ".0f"),
        number(None if line.seconds is None else line.seconds * 1000, ".2f"),
        number(None if line.recorded is None else line.recorded * 1000, ".2f"),
        number(None if fastest is None else line.rows / fastest, ".1f"),
        number(None if line.cache_bytes is None else line.cache_bytes / 2**30, ".3f"),
        number(own, ".2f"),
        note,
    ]


def kernels(model: PreTrainedModel, plan: Plan) -> str:
    """The operations of the device in one plain step of full and KVpop."""
    parts = []
    for contender in contenders(model, plan):
        if contender.name in (FULL, KVPOP):
            runner = ModelRunner(model, contender.policy, contender.budget)
            arm = DecodeArm(model, runner, filled(runner, plan.rows[0], plan.lengths[1]))
            arm.step()
            operations = [[name, f"{ms:.3f}", str(calls)] for name, ms, calls in top_kernels(arm.step)]
            parts.append(f"{contender.name}:\n\n" + table(["operation", "device ms", "calls"], operations))
            del arm
    return "\n\n".join(parts)


def check(options: argparse.Namespace) -> tuple[str, bool]:
    """Everything; the text of the section, and whether every goal is met."""
    began = time.perf_counter()
    plan, device = Plan(options.tiny), options.device

    def left() -> float:
        return float(options.limit - (time.perf_counter() - began))

    def report(text: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {text}", flush=True)

    report("every policy on a small model")
    small = small_model()
    equalities: list[Equality] = []
    for name in names():
        equalities.append(compare(name, small, device, *plan.equality))
        report(f"{name}: {equalities[-1].verdict}")
    flex = attention._by_flex_attention
    flex_small, flex.agrees = flex.agrees, None
    if options.tiny:
        model = small.to(device)
    else:
        report(f"building {SHAPE} with random weights")
        model = random_models.build(random_models.find_shape(SHAPE), device, "bfloat16", seed=0)
    weights = read_weight_bytes(model)
    record = cuda_graph if torch.device(device).type == "cuda" else None
    bench = Bench(model, contenders(model, plan), left, record, plan.runs, plan.steps)
    lines: list[Line] = []
    prompts: list[Line] = []
    # What the goals need first: the time limit cuts off what comes last.
    for seen in sorted(plan.lengths, key=lambda length: (length != plan.lengths[-1], length)):
        for rows in plan.rows:
            for line in bench.cell(seen, rows):
                lines.append(line)
                report(" | ".join(shown(line, weights)))
    for line in bench.prompts(plan.prompt, plan.chunk):
        prompts.append(line)
        report(" | ".join(shown(line, weights)))
    lines.sort(key=lambda line: (line.seen, line.rows))
    judged = goals(lines, equalities, plan, prompts)
    device_name = "the CPU" if record is None else torch.cuda.get_device_name(device)
    text = "\n\n".join(
        [
            f"On {device_name}, torch {torch.__version__}, {time.perf_counter() - began:.0f} s in all. FlexAttention "
            f"over DMS's pages: small model {_flex(flex_small)}, large model {_flex(flex.agrees)}."
            + (" Times of so small a model mean nothing." if options.tiny else ""),
            table(
                ["policy", "against the CPU", ""],
                [[equality.policy, equality.verdict, _verdict(equality.equal)] for equality in equalities],
            ),
            table(HEAD, [shown(line, weights) for line in [*lines, *prompts]]),
            table(["goal", "measured", ""], judged),
            *([kernels(model, plan)] if options.profile else []),
        ]
    )
    return text, not any("missed" in row[-1] for row in judged)


def _flex(agrees: bool | None) -> str:
    return {None: "not asked for", True: "used", False: "refused (see the warning above)"}[agrees]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; 0 where every goal is met, 1 where one is missed, 2 where it cannot be run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="a small model and short texts, only to see that it runs")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which nothing new is begun")
    parser.add_argument("--profile", action="store_true", help="also what the device does in a step of full and kvpop")
    parser.add_argument("--out", type=Path, help="file of results; benchmarks/RESULTS.md, or none with --tiny")
    options = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    try:
        if not options.tiny and torch.device(options.device).type != "cuda":
            raise UserError("The check is for a GPU: say --device cuda:0, or --tiny to see that it runs.")
        device = random_models.resolve_device(options.device)
        if not options.tiny:
            random_models.check_room(random_models.find_shape(SHAPE), SHAPE, device, "bfloat16")
        options.device = device
        text, met = check(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    if out := options.out or (None if options.tiny else RESULTS):
        replace_section(out, "On a GPU", "make gpu-check", text)
    return 0 if met or options.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
