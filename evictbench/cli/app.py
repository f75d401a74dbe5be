"""The `evictbench` command and its subcommands. Nothing heavy is imported before a subcommand needs it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from evictbench import __version__
from evictbench.cli import ending, options
from evictbench.cli.results import (
    DOCTOR_EXAMPLE,
    GATE_EXAMPLE,
    LIST_EXAMPLE,
    PLOT_EXAMPLE,
    REPORT_EXAMPLE,
    doctor,
    gate,
    listing,
    plot,
    report,
)
from evictbench.errors import RunFailed, UserError, WriteFailed
from evictbench.models import bundled, random_models
from evictbench.numerals import MOST_SEED
from evictbench.store.files import is_text, shortened
from evictbench.terminal.console import command

RUN_EXAMPLE = "evictbench run --policy h2o --budget 256 --suite ruler --limit 20"
SWEEP_EXAMPLE = "evictbench sweep --policies h2o,tova --budgets 128,256,512 --suites ruler --limit 20 --dry-run"
TRACE_EXAMPLE = (
    "evictbench trace --policies h2o,kvpop --budget 2048 --contexts 2048,8192,32768 --batch-size 1,8 "
    "--model shape:qwen3-8b"
)
TRAIN_EXAMPLE = "evictbench train --policy kvpop --data texts.jsonl --steps 500 --out kvpop-mine"
EXAMPLES = (
    RUN_EXAMPLE,
    SWEEP_EXAMPLE,
    TRACE_EXAMPLE,
    TRAIN_EXAMPLE,
    PLOT_EXAMPLE,
    REPORT_EXAMPLE,
    GATE_EXAMPLE,
    LIST_EXAMPLE,
    DOCTOR_EXAMPLE,
)

OF_THE_USER = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EILSEQ, errno.ENXIO),
)
"""Errors of a file that the user can put right."""


class Commands(TyperGroup):
    """The subcommands. The parser would end a command that Ctrl-C interrupts without a word."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise ending.Interrupted from None


app = typer.Typer(
    cls=Commands,
    name="evictbench",
    help="What a KV-cache eviction policy costs in accuracy, and what it saves in memory and time.",
    epilog="\n\n".join(("Examples:", *EXAMPLES)),
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"evictbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: options.Debug = False,
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
    tasks: options.Tasks = None,
    context: options.Context = None,
    limit: options.Limit = None,
    model: options.Model = bundled.NAME,
    weights: options.Weights = None,
    question: options.Question = "default",
    prefill: options.Prefill = "native",
    chunk: options.Chunk = 512,
    protocol: options.Protocol = "default",
    suite_version: options.SuiteVersion = None,
    repeats: options.Repeats = None,
    at: options.At = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    thinking: options.Thinking = "auto",
    system_prompt: options.SystemPrompt = None,
    max_new_tokens: options.MaxNewTokens = "auto",
    chat: options.Chat = "auto",
    chat_template: options.ChatTemplate = None,
    skip_overlong: options.SkipOverlong = False,
    batch_size: options.BatchSize = 8,
    seed: options.Seed = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: options.Dtype = "auto",
    data_dir: options.DataDir = None,
    haystack: options.Haystack = None,
    out: options.Out = Path("results/runs"),
    trust_remote_code: options.TrustRemoteCode = False,
    recency: options.Recency = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Run one model on one suite under one policy and budget; what is finished is not run again."""
    given = {name: value for name, value in locals().items() if name not in ("as_json", "quiet", "debug")}
    from evictbench.cli.run import run_and_show
    from evictbench.evaluation.settings import RunSettings

    raise typer.Exit(run_and_show(RunSettings(**given), as_json, quiet))


@app.command(epilog=f"Example: {SWEEP_EXAMPLE}")
def sweep(
    call: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help="A YAML file of the same words, and of overrides in some cells.")
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="Policies, comma-separated, with their settings; the full cache is added.")
    ] = None,
    budgets: Annotated[str | None, typer.Option(help="Budgets, comma-separated: 128,256 or 10%,25%.")] = None,
    suites: Annotated[str | None, typer.Option(help="Suites, comma-separated.")] = None,
    executor: Annotated[
        str, typer.Option(help="local (a worker process on each GPU, or on the CPU) or ray (tasks on a cluster).")
    ] = "local",
    shards: Annotated[int, options.whole(help="Jobs that each cell's documents are dealt to.")] = 1,
    gpus_per_cell: Annotated[
        float | None, options.real(help="GPUs of each job; with Ray also a part of one (0.5). Default: 1, if any.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the cells with tokens, memory and time, and run nothing.")
    ] = False,
    skip_impossible: Annotated[
        bool, typer.Option("--skip-impossible", help="Leave out cells that cannot be, such as too small a budget.")
    ] = False,
    tasks: options.Tasks = None,
    context: options.Context = None,
    limit: options.Limit = None,
    model: options.Model = bundled.NAME,
    weights: options.EachWeights = None,
    question: options.Question = "default",
    prefill: options.Prefill = "native",
    chunk: options.Chunk = 512,
    protocol: options.Protocol = "default",
    suite_version: options.SuiteVersion = None,
    repeats: options.Repeats = None,
    at: options.At = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    thinking: options.Thinking = "auto",
    system_prompt: options.SystemPrompt = None,
    max_new_tokens: options.MaxNewTokens = "auto",
    chat: options.Chat = "auto",
    chat_template: options.ChatTemplate = None,
    skip_overlong: options.SkipOverlong = False,
    batch_size: options.BatchSize = 8,
    seed: options.Seed = 0,
    device: Annotated[str, typer.Option(help="auto (every GPU), cpu, or some GPUs: cuda:0,cuda:2.")] = "auto",
    dtype: options.Dtype = "auto",
    data_dir: options.DataDir = None,
    haystack: options.Haystack = None,
    out: options.Out = Path("results/runs"),
    trust_remote_code: options.TrustRemoteCode = False,
    recency: options.Recency = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Run every policy at every budget on every suite, the full cache beside them; finished cells are not run again."""
    given = {name: value for name, value in locals().items() if name not in ("call", "file", "as_json")}
    from evictbench.cli.sweep import SweepOptions, sweep_and_show

    sweep_options = SweepOptions(**{field: given.pop(field) for field in SweepOptions.__dataclass_fields__})
    # Options that were not given are left to the file, then to the defaults.
    typed = {name: value for name, value in given.items() if "COMMANDLINE" in str(call.get_parameter_source(name))}
    raise typer.Exit(sweep_and_show(file, typed, sweep_options, as_json))


@app.command(epilog=f"Example: {TRACE_EXAMPLE}")
def trace(
    policies: Annotated[
        str, typer.Option(help="Policies, comma-separated, with their settings; the full cache is added.")
    ],
    contexts: Annotated[str, typer.Option(help="Tokens of the prompt, comma-separated.")],
    budget: Annotated[
        str | None, typer.Option(help="Cache entries per KV head: 2048, or 25%; several, comma-separated.")
    ] = None,
    new_tokens: Annotated[int, options.whole(help="Decode steps after each prompt.")] = 128,
    batch_size: Annotated[str, typer.Option(help="Rows decoded together, comma-separated.")] = "1",
    model: Annotated[
        str,
        typer.Option(
            help=f"{bundled.NAME} (bundled), a folder, a hub id, or random weights of a named shape: "
            f"{', '.join(random_models.PREFIX + name for name in random_models.SHAPES)}."
        ),
    ] = bundled.NAME,
    weights: Annotated[
        str | None, typer.Option(help="Weights of learned policies: kvpop=FOLDER,dms=FOLDER. A shape needs none.")
    ] = None,
    prefill: options.Prefill = "native",
    chunk: options.Chunk = 512,
    retention: Annotated[
        int | None, options.whole(help="Also note which positions are kept, every so many tokens.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text to read and go on with. Default: tokens drawn from the seed.")
    ] = None,
    seed: Annotated[int, options.whole(help="Seed of tokens and of a shape's weights.", most=MOST_SEED)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: options.Dtype = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the trace. Default: one in results/traces for these settings.")
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Measure time and memory of policies beside the full cache, step by step; finished cells are not run again."""
    given = {name: value for name, value in locals().items() if name not in ("as_json", "quiet", "debug")}
    from evictbench.cli.trace import trace_and_show
    from evictbench.trace.settings import TraceSettings

    raise typer.Exit(trace_and_show(TraceSettings(**given), as_json, quiet))


@app.command(epilog=f"Example: {TRAIN_EXAMPLE}")
def train(
    policy: Annotated[str, typer.Option(help="A policy that can be trained, with its settings if need be.")],
    data: Annotated[
        list[str],
        typer.Option(help="Texts: a file or folder (jsonl, json, parquet, txt), a hub dataset, or the policy's own."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for weights, log and checkpoints.")],
    model: options.Model = bundled.NAME,
    steps: Annotated[int, options.whole(help="Steps of the optimiser.")] = 1000,
    budget: Annotated[str, typer.Option(help="Cache entries per KV head; of a comma list each batch draws one.")] = (
        "256"
    ),
    window: Annotated[int, options.whole(help="Recent tokens that are always kept.")] = 32,
    recipe: Annotated[str | None, typer.Option(help="Settings of the policy's own training: ratio=8,ramp=500.")] = None,
    finetune: Annotated[
        bool, typer.Option("--finetune", help="Train the model too, to match its dense self under eviction.")
    ] = False,
    lr: Annotated[float, options.real(help="Highest learning rate of the scorer.")] = 1e-3,
    model_lr: Annotated[float, options.real(help="Learning rate of the model (--finetune).")] = 8e-5,
    length: Annotated[int, options.whole(help="Tokens per block of text, at most.")] = 2048,
    no_pack: Annotated[
        bool, typer.Option("--no-pack", help="One text a block, left as it is where shorter than --length.")
    ] = False,
    blocks: Annotated[int | None, options.whole(help="Use at most so many blocks. Default: all the steps see.")] = None,
    held_out: Annotated[
        int | None, options.whole(help="Blocks not trained on, for the loss at the end and calibration.")
    ] = None,
    batch_size: Annotated[int, options.whole(help="Blocks in one forward pass of one process.")] = 1,
    accumulate: Annotated[int, options.whole(help="Forward passes to a step.")] = 1,
    seed: Annotated[int, options.whole(help="Seed of everything that is drawn.", most=MOST_SEED)] = 0,
    save_every: Annotated[int, options.whole(help="Steps between checkpoints.")] = 100,
    weights_dtype: Annotated[str, typer.Option(help="Save the weights as float32 or float16.")] = "float32",
    store: Annotated[
        Path | None, typer.Option(help="Folder for features of the frozen model. Default: in --out.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto (the model's own).")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Train a learned policy's weights; the same command again goes on where it was stopped."""
    given = {name: value for name, value in locals().items() if name not in ("as_json", "quiet", "debug")}
    from evictbench.cli.train import train_and_show
    from evictbench.train.settings import TrainSettings

    raise typer.Exit(train_and_show(TrainSettings(**given | {"data": tuple(data)}), as_json, quiet))


app.command(epilog=f"Example: {PLOT_EXAMPLE}")(plot)
app.command(epilog=f"Example: {REPORT_EXAMPLE}")(report)
app.command(epilog=f"Example: {GATE_EXAMPLE}")(gate)
app.command(epilog=f"Example: {DOCTOR_EXAMPLE}")(doctor)
app.add_typer(listing, name="list")


def main(arguments: list[str] | None = None) -> None:
    """The `evictbench` command. Exit code 0; 1 for a failure, 2 for bad input, 130 for Ctrl-C, 143 for SIGTERM, 129 for
    SIGHUP, 141 where the reader of its output has gone."""
    given = sys.argv[1:] if arguments is None else arguments
    os.environ["MPLBACKEND"] = "agg"  # pictures go to files; a notebook's own backend may not even be there
    ending.ensure_streams()
    with ending.Signals() as signals:
        failure: Exception | None = None
        code = 0
        try:
            _check_surroundings(given)
            code = app(args=given, prog_name="evictbench", standalone_mode=False) or 0
        except (KeyboardInterrupt, ending.Interrupted):
            typer.echo("Stopped.", err=True)
            code = ending.INTERRUPTED
        except SystemExit as ended:  # the parser ends the process where a pipe is closed
            if not isinstance(ended.__context__, BrokenPipeError):
                raise
            failure = ended.__context__
        except Exception as error:
            if "--debug" in given:
                raise
            failure = error
        broken = ending.broken_output(failure)
        if broken is not None:
            code = _say(*broken)
        elif failure is not None:
            code = _report(failure)
    raise SystemExit(signals.exit_code(code))


def _check_surroundings(given: Sequence[str]) -> None:
    """Raise UserError where no command could write what it makes: names that are not UTF-8, no working folder."""
    for word in given:
        if not is_text(word):
            raise UserError(
                f"The name {word!r} is not UTF-8, and what evictbench writes is: give the file or folder another name."
            )
    try:
        os.getcwd()
    except OSError as error:
        raise UserError("The working folder is not there any more: change to another one.") from error


def _report(error: Exception) -> int:
    """Print an error as one line. Returns its exit code."""
    if isinstance(error, WriteFailed):
        text, code = f"{error} To go on: {command()}", 1
    elif isinstance(error, UserError):
        text, code = str(error), 2
    elif isinstance(error, RunFailed):
        text, code = str(error), 1
    elif hasattr(error, "format_message"):  # an error of the parser, whichever package it comes from
        text, code = error.format_message(), 2
    elif isinstance(error, OSError) and error.filename is not None and error.errno in OF_THE_USER:
        text, code = f"{shortened(Path(os.fsdecode(error.filename)))}: {error.strerror}.", 2
    else:
        text, code = f"{type(error).__name__}: {error} (--debug shows the traceback)", 1
    return _say(text, code)


def _say(text: str, code: int) -> int:
    """Print an error as one line, and return its exit code. The text is empty where the parser has shown its help."""
    if text:
        typer.echo(f"error: {' '.join(text.split())}", err=True)
    return code
