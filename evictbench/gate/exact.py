"""Runs against a baseline that they must equal: for code that is not meant to change a result.

Any change fails, up or down, that is more than the rounding of another machine's sums: in the KL of a text or of a
stretch of it, if the samples are compared with the full cache; in token ids, if they are generated; in mean occupancy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from evictbench.errors import UserError
from evictbench.gate.cells import Cell, Pair
from evictbench.gate.finding import Finding
from evictbench.gate.tolerances import EXACT_IDS, EXACT_KL, EXACT_OCCUPANCY
from evictbench.store import run_folder
from evictbench.store.select import text_of

Line = Mapping[str, Any]
Lines = Mapping[run_folder.Key, Line]

DTYPE = "float32"


def against_itself(pairs: Sequence[Pair]) -> list[Finding]:
    """Findings about the KL and agreement, or token ids, and the occupancy of every cell.

    Raises UserError for runs that are not float32.
    """
    for pair in pairs:
        for cell in (pair.here, pair.there):
            if text_of(cell.about["dtype"]) != DTYPE:
                raise UserError(
                    f"{cell.name} on {cell.suite} was made in {cell.about['dtype']}, in which no two runs need be "
                    f"equal: --exact takes runs with --dtype {DTYPE}."
                )
    return [finding for pair in pairs for finding in _of_pair(pair)]


def _of_pair(pair: Pair) -> Iterator[Finding]:
    keys = [
        (str(task), int(doc), int(repeat))
        for task, doc, repeat in zip(*(pair.samples[name] for name in ("task", "doc_id", "repeat")), strict=True)
    ]
    here, there = (_lines(side, keys) for side in (pair.here, pair.there))
    if all("kl" in line["metrics"] for side in (here, there) for line in side.values()):
        yield _kl(pair, here, there)
    yield _ids(pair, here, there)
    yield _occupancy(pair, here, there)


def _lines(cell: Cell, keys: Sequence[run_folder.Key]) -> Lines:
    lines: dict[run_folder.Key, Line] = {}
    for folder in cell.samples["folder"].astype(str).unique():
        for key, line in run_folder.read_samples(Path(folder)).items():
            lines.setdefault(key, line)
    return {key: lines[key] for key in keys}


def _kl(pair: Pair, here: Lines, there: Lines) -> Finding:
    """The KL of every text, of its quarters and of its stretches of 32 tokens."""
    furthest, where = 0.0, ""
    for key, line in here.items():
        pieces = [_pieces(line), _pieces(there[key])]
        if pieces[0].keys() != pieces[1].keys():
            raise UserError(
                f"{pair.here.name} on {pair.here.suite}: document {key[1]} of {key[0]} is another text here than in "
                "the baseline, so they are not the same samples."
            )
        for name, value in pieces[0].items():
            apart = value - pieces[1][name]
            if abs(apart) > abs(furthest):
                furthest, where = apart, f"{name} of document {key[1]} of {key[0]}"
    failed = abs(furthest) > EXACT_KL
    if failed:
        why = f"The KL of {where} differs by {furthest:+.2g} nats, and {EXACT_KL:g} are let pass."
    else:
        why = f"No KL differs by more than {EXACT_KL:g} nats; the furthest by {abs(furthest):.1g}."
    means = [fmean(line["metrics"]["kl"] for line in side.values()) for side in (here, there)]
    return _finding(pair, "kl", (means[0], means[1], furthest), len(here), failed, why)


def _pieces(line: Line) -> dict[str, float]:
    """The KL of a text and of its parts, each with its name in a sentence."""
    parts = {
        "the whole text" if name == "kl" else name: value for name, value in line["metrics"].items() if name[:2] == "kl"
    }
    stretches = line.get("by_position", {}).get("kl", ())
    return parts | {f"stretch {number} (of 32 tokens)": value for number, value in enumerate(stretches)}


def _ids(pair: Pair, here: Lines, there: Lines) -> Finding:
    """A finding about the share of samples that have the same score and, unless the text was fed, the same token ids.

    The score of a text that was fed is its agreement with the full cache; the score of choices is that of the choice.
    """
    fed = all("agreement" in line["metrics"] for side in (here, there) for line in side.values())
    for key, line in () if fed else here.items():
        if "tokens" not in line or "tokens" not in there[key]:
            raise UserError(
                f"{pair.here.name} on {pair.here.suite}: document {key[1]} of {key[0]} has no token ids in "
                f"{'the baseline' if 'tokens' in line else 'the runs'}, so they cannot be compared."
            )
    unequal = [key for key, line in here.items() if not _alike(line, there[key], fed)]
    share = 1 - len(unequal) / len(here)
    failed = share < EXACT_IDS
    what = "the same greedy tokens as the full cache at as many places" if fed else "the same token ids"
    why = f"{len(here) - len(unequal)} of {len(here)} samples have {what}, and {100 * EXACT_IDS:.0f}% must"
    if unequal:
        why += f"; the first that has not is document {unequal[0][1]} of {unequal[0][0]}"
    return _finding(pair, "ids", (share, 1.0, share - 1), len(here), failed, why + ".")


def _alike(first: Line, second: Line, fed: bool) -> bool:
    return first["score"] == second["score"] and (fed or first["tokens"] == second["tokens"])


def _occupancy(pair: Pair, here: Lines, there: Lines) -> Finding:
    """A finding about the mean occupancy of samples with answers as long in both, since longer answers fill more."""
    keys = [key for key, line in here.items() if line["output_tokens"] == there[key]["output_tokens"]] or list(here)
    means = [fmean(side[key]["occupancy_mean"] for key in keys) for side in (here, there)]
    apart = means[0] - means[1]
    failed = abs(apart) > EXACT_OCCUPANCY * means[1]
    why = f"A decode query sees {abs(apart):.3g} entries {'more' if apart > 0 else 'fewer'} on average."
    if not failed:
        why = "A decode query sees as many entries on average."
    return _finding(pair, "occupancy", (means[0], means[1], apart), len(keys), failed, why)


def _finding(
    pair: Pair, quantity: str, numbers: tuple[float, float, float], samples: int, failed: bool, why: str
) -> Finding:
    here, there, apart = numbers
    return Finding(
        status="failed" if failed else "passed",
        cell=pair.here.name,
        suite=pair.here.suite,
        task=pair.here.task,
        quantity=quantity,
        here=here,
        there=there,
        difference=apart,
        low=None,
        high=None,
        p=None,
        samples=samples,
        why=why,
        fails=failed,
    )
