"""Models on the hub as folders: the files of one commit, fetched if the hub answers, else from its local cache."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

from evictbench.errors import UserError, first_line

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
"""Patterns of the files that a config and a tokenizer may need. Weights are fetched apart, by name."""

TEMPLATE_FOLDER = "additional_chat_templates"
"""The folder of chat templates beside the default one, as transformers names it."""


def offline() -> bool:
    """Whether HF_HUB_OFFLINE switches the hub off."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def why_unreachable(timeout: float = 5.0) -> str | None:
    """The reason why the hub does not answer within `timeout` seconds; None if it does.

    A thread of its own asks, because name resolution ignores the timeout of a request.
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
            answer[0] = first_line(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return answer[0] or None


@functools.lru_cache(maxsize=8)
def snapshot(
    repo: str, revision: str | None, remote_code: bool = False, known_by: tuple[str, ...] = ("config.json",)
) -> Path:
    """The folder of `repo` at one commit, which is the folder's name, with its configs and tokenizer but no weights.

    remote_code: fetch Python files too. known_by: files any one of which shows that the local cache has the model.
    Raises UserError if the hub has no such model or revision, if it refuses access, or if it is out of reach and the
    local cache does not have the model either.
    """
    from huggingface_hub import errors, snapshot_download, try_to_load_from_cache

    named = f"{repo}@{revision}" if revision else repo
    try:
        reason = why_unreachable()
        if reason is None:
            patterns = [*SMALL_FILES, "*.py"] if remote_code else SMALL_FILES
            folder = snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"])
            commit = Path(folder).name
            snapshot_download(repo, revision=commit, allow_patterns=[f"{TEMPLATE_FOLDER}/*.jinja"])
            return Path(folder)
        files = (try_to_load_from_cache(repo, name, revision=revision) for name in known_by)
        cached = next((file for file in files if isinstance(file, str)), None)
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
        raise UserError(f"The model {named} could not be fetched from the hub: {first_line(error)}") from error
    if cached is None:
        raise UserError(
            f"The model {named} is neither a folder here nor in the local hub cache, and the hub cannot be "
            f"reached ({reason}). Fetch it where there is a network (`hf download {repo}`), or give a "
            "local folder."
        )
    return Path(cached).parent


def fetch_weights(repo: str, folder: Path, names: list[str]) -> None:
    """Fetch the named weight files of a snapshot into its folder. Raises UserError if that fails."""
    if all((folder / name).is_file() for name in names):
        return
    from huggingface_hub import snapshot_download

    reason = why_unreachable()
    if reason is None:
        try:
            snapshot_download(repo, revision=folder.name, allow_patterns=names)
        except Exception as error:
            reason = first_line(error)
    if reason is not None:
        raise UserError(f"The weights of {repo} could not be fetched from the hub: {reason}")
