"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from evictbench import __version__
from evictbench.errors import UserError

RUN_EXAMPLE = "evictbench run --policy h2o --budget 256 --suite ruler --limit 20"
LIST_EXAMPLE = "evictbench list policies"
DOCTOR_EXAMPLE = "evictbench doctor"
TRAIN_EXAMPLE = "evictbench train --policy kvpop --data texts.jsonl --steps 500 --out kvpop-mine"

app = typer.Typer(
    name="evictbench",
    help="What a KV-cache eviction policy costs in accuracy, and what it saves in memory and time.",
    epilog="\n\n".join(("Examples:", RUN_EXAMPLE, TRAIN_EXAMPLE, LIST_EXAMPLE, DOCTOR_EXAMPLE)),
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
listing = typer.Typer(
    help="What can be named on the command line: policies, suites, models.",
    epilog=f"Example: {LIST_EXAMPLE}",
    no_args_is_help=True,
)
app.add_typer(listing, name="list")

Json = Annotated[bool, typer.Option("--json", help="Print JSON and no table.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"evictbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


@app.command(epilog=f"Example: {RUN_EXAMPLE}")
def run(
    policy: Annotated[
        str,
        typer.Option(
            help="A policy, with its settings if need be (h2o:group=max), or one in a file (my_policy.py:MyPolicy)."
        ),
    ],
    suite: Annotated[str, typer.Option(help="The suite of tasks.")],
    budget: Annotated[
        str | None,
        typer.Option(help="Cache entries per KV head that a decode query may see: 256, or 25% of the text."),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of the suite, comma-separated. Default: the suite's set.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens per sample, answer included. Default: the suite's.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Samples per task. Default: the suite's.")] = None,
    model: Annotated[str, typer.Option(help="smollm2 (bundled), a local folder, or a hub id.")] = "smollm2",
    weights: Annotated[
        str | None,
        typer.Option(help="Weights of a learned policy: a folder or a hub id. Default: those that come with it."),
    ] = None,
    question: Annotated[
        str,
        typer.Option(help="Is the question there while the context is compressed? seen, unseen, default."),
    ] = "default",
    prefill: Annotated[
        str, typer.Option(help="native (as published), dense (cut at the end), bounded (never more held).")
    ] = "native",
    chunk: Annotated[int, typer.Option(help="Prompt tokens per forward pass.")] = 512,
    protocol: Annotated[
        str, typer.Option(help="A preset of the suite: default, or a paper's own. The options below change it.")
    ] = "default",
    repeats: Annotated[int | None, typer.Option(help="Answers per document. Default: the protocol's.")] = None,
    at: Annotated[int | None, typer.Option(help="The k of pass@k and maj@k. Default: the repeats.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the protocol's.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this weight.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from this many likeliest tokens; 0: from all.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw from tokens at least this likely, relative to the likeliest.")
    ] = None,
    thinking: Annotated[
        str, typer.Option(help="The chat template's switch for thoughts: on, off, auto (as the template has it).")
    ] = "auto",
    max_new_tokens: Annotated[
        str, typer.Option(help="A number, card (the protocol's), or auto (the same, if the window has room).")
    ] = "auto",
    chat: Annotated[str, typer.Option(help="Use the chat template: on, off, auto (if there is one).")] = "auto",
    skip_overlong: Annotated[
        bool, typer.Option("--skip-overlong", help="Leave out samples that do not fit the model's window.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Rows decoded together.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the data and of sampling.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto (the model's own).")] = "auto",
    data_dir: Annotated[Path | None, typer.Option(help="Folder with data files for tasks that need them.")] = None,
    haystack: Annotated[Path | None, typer.Option(help="Essay haystack: a text file, a folder, or hub.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results/runs"),
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    as_json: Json = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run one model on one suite under one policy and budget; what is finished is not run again."""
    given = {name: value for name, value in locals().items() if name not in ("as_json", "debug")}
    from evictbench.run_command import run_and_show
    from evictbench.settings import Settings

    raise typer.Exit(run_and_show(Settings(**given), as_json))


@app.command(epilog=f"Example: {TRAIN_EXAMPLE}")
def train(
    policy: Annotated[str, typer.Option(help="A policy that can be trained, with its settings if need be.")],
    data: Annotated[
        list[str],
        typer.Option(help="Texts: a file or folder (jsonl, json, parquet, txt), a hub dataset, or the policy's own."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for weights, log and checkpoints.")],
    model: Annotated[str, typer.Option(help="smollm2 (bundled), a local folder, or a hub id.")] = "smollm2",
    steps: Annotated[int, typer.Option(help="Steps of the optimiser.")] = 1000,
    budget: Annotated[str, typer.Option(help="Cache entries per KV head; of a comma list each batch draws one.")] = (
        "256"
    ),
    window: Annotated[int, typer.Option(help="Recent tokens that are always kept.")] = 32,
    recipe: Annotated[str | None, typer.Option(help="Settings of the policy's own training: ratio=8,ramp=500.")] = None,
    finetune: Annotated[
        bool, typer.Option("--finetune", help="Train the model too, to match its dense self under eviction.")
    ] = False,
    lr: Annotated[float, typer.Option(help="Highest learning rate of the scorer.")] = 1e-3,
    model_lr: Annotated[float, typer.Option(help="Learning rate of the model (--finetune).")] = 8e-5,
    length: Annotated[int, typer.Option(help="Tokens per block of text, at most.")] = 2048,
    no_pack: Annotated[
        bool, typer.Option("--no-pack", help="One text a block, left as it is where shorter than --length.")
    ] = False,
    blocks: Annotated[int | None, typer.Option(help="Use at most so many blocks. Default: all the steps see.")] = None,
    held_out: Annotated[
        int | None, typer.Option(help="Blocks not trained on, for the loss at the end and calibration.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Blocks in one forward pass of one process.")] = 1,
    accumulate: Annotated[int, typer.Option(help="Forward passes to a step.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    weights_dtype: Annotated[str, typer.Option(help="Save the weights as float32 or float16.")] = "float32",
    store: Annotated[
        Path | None, typer.Option(help="Folder for features of the frozen model. Default: in --out.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto (the model's own).")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    as_json: Json = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train a learned policy's weights; the same command again goes on where it was stopped."""
    given = {name: value for name, value in locals().items() if name not in ("as_json", "debug")}
    from evictbench.train_command import train_and_show
    from evictbench.train_settings import Settings

    raise typer.Exit(train_and_show(Settings(**given | {"data": tuple(data)}), as_json))


@listing.command("policies", epilog=f"Example: {LIST_EXAMPLE}")
def list_policies(as_json: Json = False) -> None:
    """The eviction policies, with their settings."""
    from evictbench import catalogue

    catalogue.show(catalogue.policies(), as_json)


@listing.command("suites", epilog="Example: evictbench list suites --json")
def list_suites(as_json: Json = False) -> None:
    """The suites, with their tasks."""
    from evictbench import catalogue

    catalogue.show(catalogue.suites(), as_json)


@listing.command("models", epilog="Example: evictbench list models")
def list_models(as_json: Json = False) -> None:
    """Models to start with; any other may be named by its folder or hub id."""
    from evictbench import catalogue

    catalogue.show(catalogue.models(), as_json)


@app.command(epilog=f"Example: {DOCTOR_EXAMPLE}")
def doctor(as_json: Json = False) -> None:
    """Say what is there and what is not, and what to do about it. Exit code 1 if something is missing."""
    from evictbench import catalogue

    checks = catalogue.checks()
    catalogue.show_checks(checks, as_json)
    if any(check["status"] == "missing" for check in checks):
        raise typer.Exit(1)


def main(arguments: list[str] | None = None) -> None:
    """The `evictbench` command: exit code 0, 1 for a failure, 2 for bad input, 130 for Ctrl-C."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(args=words, prog_name="evictbench", standalone_mode=False)
    except Exception as error:
        if "--debug" in words:
            raise
        code = _say(error)
    raise SystemExit(code or 0)


def _say(error: Exception) -> int:
    """Print an error as one line; the exit code that goes with it."""
    if isinstance(error, UserError):
        text, code = str(error), 2
    elif hasattr(error, "format_message"):  # the parser's own, whichever package it comes from
        text, code = error.format_message(), 2
    else:
        from evictbench.run import RunFailed

        text, code = str(error), 1
        if not isinstance(error, RunFailed):
            text = f"{type(error).__name__}: {text} (--debug shows the traceback)"
    if text:  # nothing to add where the parser has shown its help
        typer.echo(f"error: {' '.join(text.split())}", err=True)
    return code
