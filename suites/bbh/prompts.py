"""The prompts: a task's description and three worked examples, read from a file or from the installed lm-eval.

The texts are not part of this project, because their authors ask not to spread them (hence the canary line in the
files). Both sources give the same prompts, in lm-eval's layout.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evictbench.errors import UserError

FOLDERS = (
    "bbh/cot-prompts",
    "cot-prompts",
    "BBH/cot-prompts",
    "BIG-Bench-Hard/cot-prompts",
    "BIG-Bench-Hard-main/cot-prompts",
)
THINK = "Let's think step by step."

_CANARY_END = "\n-----\n"
_EXAMPLE = re.compile(rf"(?:^|\n\n)Q: (.*?)\nA: {re.escape(THINK)}\s+(.*?)(?=\n\nQ: |\Z)", re.DOTALL)
_ANSWER = re.compile(r".*answer is (.*?)\.?\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A question, its chain of thought (which ends "So the answer is ...."), and that answer alone."""

    question: str
    reasoning: str
    answer: str


@dataclass(frozen=True)
class Shots:
    """A task's description and its worked examples."""

    description: str
    examples: Sequence[Example]

    def chain_of_thought(self, question: str) -> str:
        """The prompt with worked examples, as in lm-eval's bbh_cot_fewshot."""
        shown = "".join(f"Q: {e.question}\nA: {THINK}\n{e.reasoning}\n\n" for e in self.examples)
        return f"{self.description}\n\n{shown}Q: {question}\nA: {THINK}\n"

    def direct(self, question: str) -> str:
        """The prompt with the examples' answers only, as in lm-eval's bbh_fewshot."""
        shown = "".join(f"Q: {e.question}\nA: {e.answer}\n\n" for e in self.examples)
        return f"{self.description}\n\n{shown}Q: {question}\nA:"

    @property
    def sha256(self) -> str:
        """The hash of the prompt with worked examples and an empty question."""
        return hashlib.sha256(self.chain_of_thought("").encode()).hexdigest()


def shots(subject: str, data_dir: Path | None) -> Shots:
    """The description and examples of a task, from <task>.txt in one of FOLDERS of `data_dir` if it is there, else from
    the installed lm-eval. Raises UserError naming the file if that is not such a prompt."""
    for folder in FOLDERS if data_dir else ():
        assert data_dir is not None
        path = data_dir / folder / f"{subject}.txt"
        if path.is_file():
            return from_file(path)
    return from_lm_eval(subject)


def from_file(path: Path) -> Shots:
    """Read a file of the authors' cot-prompts: a canary line, a line of dashes, and the prompt."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    body = text.partition(_CANARY_END)[2] or text
    description, _, _ = body.partition("\n\nQ: ")
    examples = [_example(match[1], match[2], str(path)) for match in _EXAMPLE.finditer(body)]
    if len(examples) != 3 or description.startswith("Q: "):
        raise UserError(
            f"{path} is not a prompt of BBH: expected what the task asks for and three examples "
            f"(Q: ..., A: {THINK} ...), found {len(examples)} of them."
        )
    return Shots(description.strip("\n"), examples)


def from_lm_eval(subject: str) -> Shots:
    """Read the task file that comes with lm-eval (MIT)."""
    import lm_eval
    import yaml

    path = Path(lm_eval.__file__).parent / "tasks" / "bbh" / "cot_fewshot" / f"{subject}.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        pairs = [(sample["input"], sample["target"]) for sample in content["fewshot_config"]["samples"]]
        description = content["description"].strip("\n")
    except (OSError, KeyError, TypeError) as error:
        raise UserError(
            f"The installed lm-eval has no examples for BBH's {subject}; put the authors' {subject}.txt into "
            f"{FOLDERS[0]} of a folder and give it with --data-dir."
        ) from error
    return Shots(description, [_example(*pair, str(path)) for pair in pairs])


def _example(question: str, reasoning: str, where: str) -> Example:
    reasoning = reasoning.rstrip("\n")
    match = _ANSWER.fullmatch(reasoning)
    if match is None:
        raise UserError(f"{where}: an example does not end with its answer (So the answer is ...).")
    return Example(question, reasoning, match[1])
