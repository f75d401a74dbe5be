"""Every causal language model family of the installed transformers: checked in small, or refused with the reason.

    python -m studies.families                           # all of them, into docs/model-families.md
    python -m studies.families --families llama,glm      # some, to the terminal alone

Each family is looked at in a process of its own, with a limit on its time. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from evictbench.errors import UserError
from studies.command import exit_code, say
from studies.family_sizes import OVERRIDES, small_config

DOCUMENT = Path("docs/model-families.md")

LIMIT = 300
"""Seconds that a family may take."""


@dataclass
class Family:
    """What was found about a family.

    model_class: what transformers loads it as. refused: why it is refused, None if it is not. checked: the largest
    difference of two logits by check, or the sentence by which the check's policy refuses the family. failed: what went
    wrong, by check.
    """

    name: str
    model_class: str
    refused: str | None = None
    checked: dict[str, float | str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def families() -> dict[str, str]:
    """Every family that transformers loads as a causal language model, with its model class, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def look_at(name: str, model_class: str) -> Family:
    """Build a family in small and check it, or note why it is refused."""
    from evictbench.models.supported import check_supported, first_line
    from studies.family_checks import CHECKS, build

    family = Family(name, model_class)
    try:
        check_supported(_config(name))
    except UserError as error:
        family.refused = str(error)
        return family
    try:
        model = build(name)
    except Exception as error:
        family.failed["build"] = f"{type(error).__name__}: {first_line(error)}"
        return family
    for check, run in CHECKS.items():
        try:
            family.checked[check] = run(model)
        except UserError as error:
            family.checked[check] = str(error)
            if check != "streaming_llm":  # any other policy has to run on a family that is accepted
                family.failed[check] = str(error)
        except Exception as error:
            family.failed[check] = f"{type(error).__name__}: {first_line(error)}"
    return family


def _config(name: str) -> Any:
    """A family's config in small, or its default where the small one cannot be made; both may be refused alike."""
    from transformers import CONFIG_MAPPING

    try:
        return small_config(name)
    except Exception:
        return CONFIG_MAPPING[name]()


def look_at_all(chosen: dict[str, str], jobs: int, finished: Path | None) -> list[Family]:
    """Look at families, so many at a time, each in a forked process, so that none ends the others.

    finished: a file of families that are done, a line each; what is in it is not done again unless it failed.
    """
    import torch

    import studies.family_checks  # noqa: F401  # imported once, before the forks

    torch.set_num_threads(1)
    forked = multiprocessing.get_context("fork")
    found = _read(finished)
    waiting = [name for name in chosen if name not in found]
    running: dict[Any, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            receiver, sender = forked.Pipe(duplex=False)
            process = forked.Process(target=_send, args=(sender, name, chosen[name]))
            process.start()
            sender.close()
            running[receiver] = name, process, time.monotonic() + LIMIT
        ready = connection.wait(list(running), timeout=1)
        for receiver, (name, process, deadline) in list(running.items()):
            if receiver not in ready and time.monotonic() < deadline:
                continue
            family = Family(name, chosen[name], failed={"all": f"it took over {LIMIT} seconds"})
            try:
                if receiver in ready:
                    family = receiver.recv()
            except EOFError:
                family.failed = {"all": "its process ended"}
            process.kill()
            process.join()
            del running[receiver]
            found[name] = family
            if finished is not None:
                with finished.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(family)) + "\n")
            say(f"{name}: {_verdict(family)}")
            for check, why in family.failed.items():
                say(f"  {check}: {why}")
    return [found[name] for name in chosen]


def _read(finished: Path | None) -> dict[str, Family]:
    """The families of a file that did not fail."""
    if finished is None or not finished.is_file():
        return {}
    lines = finished.read_text(encoding="utf-8").splitlines()
    families = [Family(**json.loads(line)) for line in lines]
    return {family.name: family for family in families if not family.failed}


def _send(sender: Any, name: str, model_class: str) -> None:
    warnings.simplefilter("ignore")
    sender.send(look_at(name, model_class))


def _verdict(family: Family) -> str:
    if family.failed:
        return "FAILED"
    return "accepted" if family.refused is None else f"refused: {reason(family)}"


def reason(family: Family) -> str:
    """Why a family is refused, without the words that all such sentences share."""
    assert family.refused is not None
    _, _, rest = family.refused.partition("cannot be measured: ")
    return (rest or family.refused).partition(". Only plain softmax")[0]


def document(found: Sequence[Family], version: str) -> str:
    """The page about the families, in Markdown. version: of transformers."""
    from studies.family_checks import BUDGET, LENGTH, PROMPT, TOLERANCE

    accepted = [family for family in found if family.refused is None]
    refused = [family for family in found if family.refused is not None]
    lines = [
        "# Model families",
        "",
        f"Made by `make families` with transformers {version}. It knows {len(found)} families of causal language "
        f"models: {len(accepted)} are accepted, {len(refused)} are refused before their weights are loaded.",
        "",
        "An accepted family was built with 4 layers and random weights in float64, and compared with transformers' own "
        f"cache and attention on {LENGTH} tokens, {PROMPT} of them prompt:",
        "",
        "- `full`: a budget of the whole text (full, H2O, StreamingLLM; chunks of 16, 32, 512) equals `DynamicCache`.",
        "- `padded`: a row that is padded on the left equals the same text alone.",
        "- `chunks`: chunks of 32 and of 512 tokens agree under the full cache, StreamingLLM, H2O and random.",
        f"- The other columns: at a budget of {BUDGET} the policy equals its definition, written as a mask over "
        "`DynamicCache`; TOVA, H2O and SnapKV keep the entries that the definition keeps. StreamingLLM stands there as "
        "published, and with original positions.",
        "",
        f"A number is the largest difference of two logits; {TOLERANCE:g} passes. Where it is about 1e-6, the model "
        "computes its rotation in float32. A dash: the policy refuses the family, for the reason below the table.",
        "",
        "A checkpoint is judged by its own config: a family that is accepted here is refused where a checkpoint's "
        "config asks for more, such as a sliding window.",
        "",
        "## Accepted",
        "",
    ]
    checks = list(dict.fromkeys(check for family in accepted for check in family.checked))
    lines += [f"| family | model class | {' | '.join(checks)} |", f"|---|---|{'---|' * len(checks)}"]
    notes: dict[str, list[str]] = {}
    for family in accepted:
        cells = []
        for check in checks:
            value = family.checked.get(check)
            if isinstance(value, str):
                about = value.replace(family.model_class, "the model")
                notes.setdefault(about, []).append(family.name)
            cells.append(f"{value:.0e}" if isinstance(value, float) else "-")
        lines.append(f"| {family.name} | {family.model_class} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"- {', '.join(names)}: {about}" for about, names in notes.items()]
    special = [family.name for family in accepted if family.name in OVERRIDES]
    lines += [f"- Built with settings of their own: {_settings(special)}.", ""] if special else [""]
    lines += ["## Refused", "", "| family | model class | why |", "|---|---|---|"]
    lines += [f"| {family.name} | {family.model_class} | {_cell(reason(family))} |" for family in refused]
    return "\n".join(lines) + "\n"


def _settings(names: Sequence[str]) -> str:
    return ", ".join(
        f"{name} ({', '.join(f'`{key}={value}`' for key, value in OVERRIDES[name].items())})" for name in names
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.families", description=__doc__.partition("\n")[0])
    parser.add_argument("--families", help="some families, separated by commas; nothing is written")
    parser.add_argument("--out", type=Path, default=DOCUMENT, help="the page (default: %(default)s)")
    parser.add_argument("--finished", type=Path, help="a file that remembers what is done; made if it is not there")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time (default: %(default)s)")
    return exit_code(_families, parser.parse_args(arguments))


def _families(options: argparse.Namespace) -> int:
    import transformers

    transformers.logging.set_verbosity_error()
    known = families()
    names = options.families.split(",") if options.families else list(known)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"transformers {transformers.__version__} has no causal language model {', '.join(unknown)}.")
    found = look_at_all({name: known[name] for name in names}, options.jobs, options.finished)
    failed = [family.name for family in found if family.failed]
    if options.families:
        print(document(found, transformers.__version__))
    elif not failed:
        options.out.write_text(document(found, transformers.__version__), encoding="utf-8")
        say(f"written to {options.out}")
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
