"""Errors whose message is a sentence, and the errors of libraries: which kind they are, and in a line."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Something the user can put right. The message is one complete sentence; the command line prints it
    on stderr and exits with code 2, without a traceback."""


class RunFailed(Exception):
    """A run or a training that cannot be trusted to go on. The message is one sentence; the command line prints it on
    stderr and exits with code 1, without a traceback."""


class NotFinite(RunFailed):
    """The model gave logits that are NaN or infinite. key: of the sample, as its request has it. tokens: how many of
    the answer there were before."""

    def __init__(self, key: object, tokens: int) -> None:
        super().__init__(
            f"The model gave logits that are not finite, NaN or infinite, for sample {key} after {tokens} tokens."
        )
        self.key = key
        self.tokens = tokens


class WriteFailed(RunFailed):
    """A file could not be written: the disk is full, or the folder has gone. What was finished before is kept. The
    message names the file and the reason."""


def unknown(kind: str, name: str, known: Iterable[str], where: str = "") -> UserError:
    """The error for a name that does not exist; its sentence offers near matches, or all known names.

    kind: what is named ("policy"). where: words after the name (" of ruler").
    """
    known = sorted(known)
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif known:
        hint = f"there {'is' if len(known) == 1 else 'are'} {', '.join(known)}."
    else:
        hint = "there is none."
    return UserError(f"Unknown {kind} {name!r}{where}: {hint}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException) -> str:
    """An error's whole message with each run of white space as one blank."""
    return " ".join(str(error).split())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that there was no memory left, on a GPU or for the process. It imports no torch."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)
