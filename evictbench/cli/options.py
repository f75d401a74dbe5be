"""Options that commands share, as the command line takes them. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from evictbench.models import bundled
from evictbench.numerals import MOST_SEED, read_real, read_whole, shown


def whole(help: str, most: int | None = None) -> Any:
    """An option that takes a whole number of ASCII digits. most: the largest; None: the largest count."""
    return _number(help, "<int>", read_whole if most is None else lambda text: read_whole(text, most))


def real(help: str) -> Any:
    """An option that takes a finite number."""
    return _number(help, "<float>", read_real)


def _number(help: str, metavar: str, read: Callable[[str], int | float]) -> Any:
    def parse(value: str) -> int | float:
        try:
            return read(str(value))
        except ValueError as error:
            raise typer.BadParameter(f"it takes {error}, and not {shown(value)!r}.") from None

    return typer.Option(help=help, parser=parse, metavar=metavar)


Json = Annotated[bool, typer.Option("--json", help="Print JSON and no table.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Results, warnings and errors alone: no progress, no hints.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

Tasks = Annotated[str | None, typer.Option(help="Tasks of the suite, comma-separated. Default: the suite's set.")]
Context = Annotated[
    int | None, whole(help="Tokens per sample, answer included. Default: the protocol's, or the suite's.")
]
Limit = Annotated[int | None, whole(help="Samples per task. Default: the protocol's, or the suite's.")]
Model = Annotated[str, typer.Option(help=f"{bundled.NAME} (bundled), a local folder, or a hub id.")]
Weights = Annotated[
    str | None,
    typer.Option(help="Weights of a learned policy: a folder or a hub id. Default: those that come with it."),
]
EachWeights = Annotated[
    str | None,
    typer.Option(
        help="Weights of a learned policy: a folder or a hub id; of several trainings, comma-separated: each is a cell "
        "of its own. Default: those that come with it."
    ),
]
Question = Annotated[
    str,
    typer.Option(help="Is the question there while the context is compressed? seen, unseen, default."),
]
Prefill = Annotated[str, typer.Option(help="native (as published), dense (cut at the end), bounded (never more held).")]
Chunk = Annotated[int, whole(help="Prompt tokens per forward pass.")]
Protocol = Annotated[
    str, typer.Option(help="A preset of the suite: default, or a paper's own. The options below change it.")
]
SuiteVersion = Annotated[
    str | None, typer.Option(help="An earlier version of the suite's prompts, to extend old results.")
]
Repeats = Annotated[int | None, whole(help="Answers per document. Default: the protocol's.")]
At = Annotated[int | None, whole(help="The k of pass@k and maj@k. Default: the repeats.")]
Temperature = Annotated[float | None, real(help="0 is greedy. Default: the protocol's.")]
TopP = Annotated[float | None, real(help="Draw from the likeliest tokens of this weight.")]
TopK = Annotated[int | None, whole(help="Draw from this many likeliest tokens; 0: from all.")]
MinP = Annotated[float | None, real(help="Draw from tokens at least this likely, relative to the likeliest.")]
Thinking = Annotated[
    str,
    typer.Option(
        help="The template's switch for thoughts: on, off, auto (the protocol's, or else the template's own)."
    ),
]
SystemPrompt = Annotated[
    str | None, typer.Option(help="What the system says in the chat template. Default: the protocol's, or nothing.")
]
MaxNewTokens = Annotated[
    str, typer.Option(help="A number, card (the protocol's), or auto (the same, if the window has room).")
]
Chat = Annotated[str, typer.Option(help="Use the chat template: on, off, auto (if there is one).")]
ChatTemplate = Annotated[
    str | None, typer.Option(help="Name of the chat template, where the tokenizer brings several. Default: default.")
]
SkipOverlong = Annotated[
    bool, typer.Option("--skip-overlong", help="Leave out samples that do not fit the model's window.")
]
BatchSize = Annotated[int, whole(help="Rows decoded together.")]
Seed = Annotated[int, whole(help="Seed of the data and of sampling.", most=MOST_SEED)]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto (the model's own).")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with data files for tasks that need them.")]
Haystack = Annotated[Path | None, typer.Option(help="Essay haystack: a text file, a folder, or hub.")]
Out = Annotated[Path, typer.Option(help="Folder for results.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
Recency = Annotated[
    str | None,
    typer.Option(
        help="Also measure which share of the kept entries a window of the last tokens would keep: a number of tokens, "
        "or same (as many as are kept)."
    ),
]

Trainings = Annotated[
    bool,
    typer.Option(
        "--trainings",
        help="Runs that differ in a learned policy's weights alone are one row: mean and standard deviation over its "
        "trainings.",
    ),
]

OnlySuites = Annotated[str | None, typer.Option(help="These suites alone, comma-separated.")]
OnlyModels = Annotated[str | None, typer.Option(help="These models alone.")]
OnlyTasks = Annotated[str | None, typer.Option(help="These tasks alone.")]
OnlyPolicies = Annotated[str | None, typer.Option(help="These policies alone, with their settings.")]
OnlyBudgets = Annotated[str | None, typer.Option(help="These budgets alone; none is the full cache's.")]
Where = Annotated[
    list[str] | None, typer.Option(help="column=value: runs with that value alone (question=seen). Repeatable.")
]
