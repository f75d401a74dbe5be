"""A tokenizer's chat template: the one that is used, what it wants of a conversation, and conversations in it.

Templates differ. Some take a message's content as a text, some as a list of parts; some have no system role, and refuse
or forget what is in it; a tokenizer may bring several. `choose` settles which template is used and lets it take texts.
`render` is the one way from messages to a prompt, and checks that the prompt holds every message.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError, first_line, unknown

if TYPE_CHECKING:
    from types import FrameType

    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A role and a content, which is a text."""

CHAT_DAY = date(2024, 7, 26)
"""The date that chat templates are told, so that a prompt is the same every day."""

DEFAULT = "default"
"""The name of a template that is the only one, and of the one among several that is used unless another is named."""

LONGEST_TEMPLATE = 1_000_000
"""Characters of a template; the longest known ones have some 30,000."""

MOST_AROUND, MOST_TIMES = 100_000, 4
"""A rendered conversation has at most so many characters, and so many more for each of its own."""

MOST_SECONDS = 20.0
"""Processor time that rendering one conversation may take; a prompt of a million tokens takes less than one."""

_PROBE = "What follows from this sentence, and what from the one after it?"
_SYSTEM_PROBE = "This is said before anything is asked."

_PRINTED_LIST = re.compile(r"""['"]text['"]\s*:\s*['"]""" + re.escape(_PROBE))
"""A list of parts that a template prints as it is."""

_TO_PARTS = (
    "{%- set conversation = namespace(turns=[]) -%}{%- for message in messages -%}"
    "{%- set conversation.turns = conversation.turns"
    " + [dict(message, content=[{'type': 'text', 'text': message['content']}])] -%}"
    "{%- endfor -%}{%- set messages = conversation.turns +%}"
)
"""Put before a template that wants parts: it makes them of texts. (The plus keeps the template's first line break.)"""


_SAID_BY_THE_SYSTEM = (
    "{%- if messages and messages[0]['role'] == 'system' -%}"
    "{%- set messages = [dict(messages[0], content=SAID + '\n\n' + messages[0]['content'])] + messages[1:] -%}"
    "{%- else -%}{%- set messages = [{'role': 'system', 'content': SAID}] + messages -%}{%- endif +%}"
)
_SAID_IN_THE_FIRST_TURN = (
    "{%- set asked = namespace(turns=[], said=false) -%}{%- for message in messages -%}"
    "{%- if message['role'] == 'user' and not asked.said -%}{%- set asked.said = true -%}"
    "{%- set asked.turns = asked.turns + [dict(message, content=SAID + '\n\n' + message['content'])] -%}"
    "{%- else -%}{%- set asked.turns = asked.turns + [message] -%}{%- endif -%}"
    "{%- endfor -%}{%- set messages = asked.turns +%}"
)
"""Put before a template with a system role, and before one without: the system's text SAID, before all else. (The plus
keeps the template's first line break.)"""


class _TooMuch(Exception):
    """Rendering takes too long, or gives too long a text."""


@dataclass(frozen=True)
class ChatTemplate:
    """The template that a run uses.

    name: its name among the tokenizer's. text: as the tokenizer brings it. parts: it wants content as a list of parts.
    model: the model's name, for sentences.
    """

    name: str
    text: str = field(repr=False)
    parts: bool
    model: str

    def __str__(self) -> str:
        which = "" if self.name == DEFAULT else f" {self.name}"
        return f"The chat template{which} of {self.model}"

    @property
    def record(self) -> str:
        """The template in a run's record: name, hash, and the content it wants where that is not a text."""
        sha256 = hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()
        return f"{self.name} sha256:{sha256}{' (content in parts)' if self.parts else ''}"

    @property
    def identity(self) -> str | None:
        """What goes into a fingerprint: None for the default template with texts, which needs no mention."""
        return self.record if self.parts or self.name != DEFAULT else None


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer brings a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def choose(tokenizer: PreTrainedTokenizerBase, name: str | None, model: str) -> ChatTemplate:
    """Make a tokenizer's template ready: afterwards it has this one only, and takes contents that are texts.

    name: that of `--chat-template`; None for the default, or the only one. model: its name, for sentences.
    Raises UserError for a name that is not there, for several templates without a default, and for a template that
    fails or that shows no user's text.
    """
    brought: Any = tokenizer.chat_template
    templates: dict[str, str] = brought if isinstance(brought, dict) else {DEFAULT: str(brought)}
    if name is None and len(templates) == 1:
        (name,) = templates
    if name is None and DEFAULT not in templates:
        raise UserError(
            f"The tokenizer of {model} has several chat templates and no default: choose one of "
            f"{', '.join(sorted(templates))} with --chat-template."
        )
    name = name or DEFAULT
    if name not in templates:
        raise unknown("chat template", name, sorted(templates), f" of {model}")
    text = str(templates[name])
    if len(text) > LONGEST_TEMPLATE:
        raise UserError(
            f"The chat template of {model} has {len(text):,} characters, and {LONGEST_TEMPLATE:,} are the most that is "
            "read: use --chat off."
        )
    tokenizer.chat_template = text
    chosen = ChatTemplate(name, text, _wants_parts(tokenizer, model), model)
    if chosen.parts:
        tokenizer.chat_template = _TO_PARTS + text
    return chosen


def say(tokenizer: PreTrainedTokenizerBase, system_prompt: str, template: ChatTemplate) -> None:
    """Give every conversation a system prompt; it goes before the first user's text where there is no system role.

    The tokenizer's template itself is changed, so that everyone who measures or renders a prompt gets the same one.
    template: the chosen one, for sentences. Raises UserError where the template leaves the system prompt out.
    """
    before = _SAID_BY_THE_SYSTEM if takes_system(tokenizer) else _SAID_IN_THE_FIRST_TURN
    # JSON's escapes are Jinja's too.
    tokenizer.chat_template = before.replace("SAID", json.dumps(system_prompt, ensure_ascii=False)) + str(
        tokenizer.chat_template
    )
    text = render(tokenizer, [{"role": "user", "content": _PROBE}], template=str(template), add_generation_prompt=True)
    if not holds(text, system_prompt):
        raise UserError(f"{template} leaves out or changes the system prompt: use another template, or none of it.")


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    template: str = "The chat template",
    where: str = "a conversation",
    **options: Any,
) -> str:
    """A conversation in the tokenizer's chat template, as text.

    A system message goes before the first user's text where the template has no system role. Templates that ask for
    the date are told `CHAT_DAY`. options: as of `apply_chat_template`. template, where: for sentences, the template and
    the document whose prompt is made.
    Raises UserError where the template raises, takes too long, makes too long a text, or leaves out a message.
    """
    if any(message["role"] == "system" for message in messages) and not takes_system(tokenizer):
        messages = in_first_turn(messages)
    try:
        text = _render(tokenizer, messages, **options)
    except _TooMuch as error:
        raise UserError(f"{template} {error} ({where}): use another template, or --chat off.") from error
    except Exception as error:  # templates raise what they like
        raise UserError(f"{template} cannot render {where}: {first_line(error).rstrip('.')}.") from error
    lost = next((message for message in messages if not holds(text, str(message["content"]))), None)
    if lost is not None:
        raise UserError(
            f"{template} leaves out or changes the text of the {lost['role']} ({where}), so the model would not read "
            "what is asked: use another template, or --chat off."
        )
    return text


def holds(prompt: str, text: str) -> bool:
    """Whether a prompt holds a text, without the blanks around it, as it is or as JSON writes it."""
    bare = text.strip()
    return bare in prompt or any(json.dumps(bare, ensure_ascii=ascii)[1:-1] in prompt for ascii in (False, True))


def takes_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template shows what a system message says."""
    turns = [{"role": "system", "content": _SYSTEM_PROBE}, {"role": "user", "content": _PROBE}]
    try:
        text = _render(tokenizer, turns, add_generation_prompt=True)
    except Exception:  # a template that raises has no such role; where it has another fault, `render` meets it
        return False
    return _SYSTEM_PROBE in text and _PROBE in text


def in_first_turn(messages: Iterable[Message]) -> list[Message]:
    """The messages with what the system says before the first user's text, a blank line between the two."""
    said = [str(message["content"]) for message in messages if message["role"] == "system"]
    turns = [message for message in messages if message["role"] != "system"]
    first = next((i for i, message in enumerate(turns) if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": "\n\n".join(said)}, *turns]
    content = "\n\n".join([*(text.rstrip() for text in said), str(turns[first]["content"])])
    return [*turns[:first], {**turns[first], "content": content}, *turns[first + 1 :]]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The special or added token that follows an assistant's text in the template; None where there is none."""
    if not has_chat_template(tokenizer) or not isinstance(tokenizer.chat_template, str):
        return None
    answer = "That which was asked for."
    turns = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": answer}]
    try:
        text = _render(tokenizer, turns)
    except Exception:  # such a template cannot say
        return None
    _, found, tail = text.rpartition(answer)
    tail = tail.lstrip()
    tokens = {*tokenizer.all_special_tokens, *map(str, getattr(tokenizer, "added_tokens_encoder", ()))}
    known = [token for token in tokens if found and token and tail.startswith(token)]
    return max(known, key=len, default=None)


def _wants_parts(tokenizer: PreTrainedTokenizerBase, model: str) -> bool:
    """Whether the template shows a user's text as a list of parts alone. Raises UserError where it shows neither."""
    failure: Exception | None = None
    for content, parts in ((_PROBE, False), ([{"type": "text", "text": _PROBE}], True)):
        try:
            text = _render(tokenizer, [{"role": "user", "content": content}], add_generation_prompt=True)
        except _TooMuch as error:
            raise UserError(f"The chat template of {model} {error}: use another, or --chat off.") from error
        except Exception as error:  # templates raise what they like
            failure = failure or error
        else:
            printed = parts and _PRINTED_LIST.search(text)
            if _PROBE in text and not printed:
                return parts
    if failure is not None:
        raise UserError(
            f"The chat template of {model} cannot render a user's turn: {first_line(failure).rstrip('.')}."
        ) from failure
    raise UserError(
        f"The chat template of {model} leaves out what the user says, be it a text or a list of parts: use another, or "
        "--chat off."
    )


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """A conversation in the template, on the chat day, within the limits of length and time."""
    template = _on_chat_day(str(tokenizer.get_chat_template()))
    own = sum(len(str(message["content"])) for message in messages)
    most = MOST_AROUND + MOST_TIMES * own
    with _processor_time(MOST_SECONDS), _at_most(most, template):
        turns: list[Any] = list(messages)
        text = str(tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False, **options))
    if len(text) > most:
        raise _TooMuch(_too_long(most))
    return text


def _too_long(most: int) -> str:
    return f"makes more than {most:,} characters of a conversation that has far fewer"


def _on_chat_day(template: str) -> str:
    """A template with its clock set to CHAT_DAY. (Templates take data from outside, no functions.)"""
    if "strftime_now" not in template:
        return template
    codes = [f"%{code}" for code in ("-d", "-m", *"aAbBdHIjmMpSyY")]
    replaced = "".join(f"|replace('{code}', '{CHAT_DAY.strftime(code)}')" for code in codes)
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{replaced} }}}}{{%- endmacro -%}}{template}"


@contextmanager
def _at_most(most: int, template: str) -> Iterator[None]:
    """Inside, a template stops at so many characters, rather than fill the memory first.

    transformers keeps compiled templates; how Jinja joins a template's pieces is an attribute of its environment.
    """
    from transformers.utils import chat_template_utils

    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compile_template is None:  # another version of transformers: the length is looked at afterwards
        yield
        return

    def join(pieces: Iterable[str]) -> str:
        kept, length = [], 0
        for piece in pieces:
            length += len(piece)
            if length > most:
                raise _TooMuch(_too_long(most))
            kept.append(piece)
        return "".join(kept)

    environment = compile_template(template).environment
    environment.concat = join
    try:
        yield
    finally:
        del environment.concat


@contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Raise _TooMuch once this process has computed for so long. Threads other than the main one have no such clock."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooMuch(f"takes more than {seconds:g} seconds to render a conversation")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
