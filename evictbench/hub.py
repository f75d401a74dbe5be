"""Hub models as folders: one commit's files, fetched if the hub answers, else read from its local cache."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

from evictbench.errors import UserError

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
"""What a config and a tokenizer may need, by pattern; weights are fetched apart, by name."""


def offline() -> bool:
    """Whether the hub is switched off by HF_HUB_OFFLINE."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def why_unreachable(timeout: float = 5.0) -> str | None:
    """Why the hub does not answer within `timeout` seconds; None if it does.

    Asked from a thread of its own: name resolution ignores the timeout of a request.
    """
    if offline():
        return "HF_HUB_OFFLINE is set"
    answer = [f"no answer within {timeout:g} seconds"]

    def ask() -> None:
        from huggingface_hub import constants, get_session

        try:
            get_session().head(constants.ENDPOINT, timeout=timeout)
            answer[0] = ""
        except Exception as error:  # whichever HTTP library is underneath
            answer[0] = _first_line(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return answer[0] or None


@functools.lru_cache(maxsize=8)
def snapshot(
    repo: str, revision: str | None, remote_code: bool = False, known_by: tuple[str, ...] = ("config.json",)
) -> Path:
    """The folder of `repo` at one commit (the folder's name), with its configs and tokenizer but no weights.

    known_by: files of which any one shows that the local cache has it.
    Raises UserError if the hub has no such model or revision, or refuses it, or is out of reach and its local
    cache has none either.
    """
    from huggingface_hub import errors, snapshot_download, try_to_load_from_cache

    named = f"{repo}@{revision}" if revision else repo
    try:
        reason = why_unreachable()
        if reason is None:
            patterns = [*SMALL_FILES, "*.py"] if remote_code else SMALL_FILES
            return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))
        found = (try_to_load_from_cache(repo, name, revision=revision) for name in known_by)
        cached = next((file for file in found if isinstance(file, str)), None)
    except errors.HFValidationError as error:
        raise UserError(f"{named} is neither a folder nor a hub id (owner/name).") from error
    except errors.GatedRepoError as error:
        raise UserError(
            f"The hub gives {named} only to those who have accepted its licence: accept it on the model's "
            "page, then log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"There is no model {named} on the hub, or it is private.") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"The model {repo} has no revision {revision}.") from error
    except Exception as error:
        raise UserError(f"The model {named} could not be fetched from the hub: {_first_line(error)}") from error
    if cached is None:
        raise UserError(
            f"The model {named} is neither a folder here nor in the local hub cache, and the hub cannot be "
            f"reached ({reason}). Fetch it where there is a network (`hf download {repo}`), or give a "
            "local folder."
        )
    return Path(cached).parent


def fetch_weights(repo: str, folder: Path, names: list[str]) -> None:
    """Bring the named weight files of the snapshot's commit into its folder; UserError if that fails."""
    if all((folder / name).is_file() for name in names):
        return
    from huggingface_hub import snapshot_download

    reason = why_unreachable()
    if reason is None:
        try:
            snapshot_download(repo, revision=folder.name, allow_patterns=names)
        except Exception as error:
            reason = _first_line(error)
    if reason is not None:
        raise UserError(f"The weights of {repo} could not be fetched from the hub: {reason}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
