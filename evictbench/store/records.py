"""What the files of results hold: every field of `run.json`, `samples.jsonl`, `summary.json` and `trace.json`, with its
type and range. Whatever reads results reads them through here, so that what is damaged is a sentence.

Fields that are not named here are let pass, so that files of later versions can be read. A key that is there twice,
NaN, a number that no float holds, and nesting beyond what the parser takes are refused anywhere.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from evictbench.errors import UserError
from evictbench.policy.budget import Budget
from evictbench.store.files import LONGEST_LINE, open_file

LARGEST = 2**53
"""The largest count: beyond it a float does not hold every whole number."""

MOST = 1e300
"""The largest measured number."""

MOST_NLL = 700.0
"""The largest negative log-likelihood of a token, in nats: the perplexity has to be a number that a float holds."""

Name = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Amount = Annotated[float, Meta(ge=0, le=MOST)]
Number = Annotated[float, Meta(ge=-MOST, le=MOST)]
Scalar = str | int | float | bool | None

METRICS: Mapping[str, tuple[float, float]] = {
    "score": (0, 1),
    "score_difflib": (0, 1),
    "agreement": (0, 1),
    "kl": (-1e-3, MOST),
    **{f"kl_q{quarter}": (-1e-3, MOST) for quarter in (1, 2, 3, 4)},
    "nll": (-1e-3, MOST_NLL),
    "nll_full": (-1e-3, MOST_NLL),
    "ppl_ratio": (0, MOST),
}
"""Least and largest value of metrics that the suites write; others may be any number. What cannot be below 0 can come
out below it by the rounding of float16."""

COMPLETE = frozenset(METRICS) - {f"kl_q{quarter}" for quarter in (1, 2, 3, 4)}
"""Metrics that all samples of a task have if one has. Short texts have no quarters."""

RECENCY_VERSION = 1
"""Raised when the share of kept entries inside a recency window is measured another way."""

CHECKSUM = "crc32"
"""The last field of a sample line: the CRC-32 of the run's fingerprint and of the line before it. Lines of earlier
versions, and published ones, have none."""

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for a line that is no JSON of ours."""

_CHECKSUM = re.compile(rb', "crc32": "([0-9a-f]{8})"\}\s*\Z')
_KEY = re.compile(rb'"\s*:')

Kind = TypeVar("Kind")


class Recency(Struct, kw_only=True):
    """How much of what was kept lay inside a recency window, in [0, 1], while an answer was decoded.

    version: of this record, `RECENCY_VERSION`. window: so many last tokens, or "same", as many as the head keeps.
    every: decode steps between the moments at which it was looked at; moments: how many those were. share: the mean
    over moments, layers and KV heads. by_layer: the mean of each layer; null where it never kept anything.
    """

    version: Annotated[int, Meta(ge=1, le=RECENCY_VERSION)]
    window: Annotated[str, Meta(pattern="^(same|[1-9][0-9]*)$")]
    every: Positive
    moments: Positive
    share: Share
    by_layer: list[Share | None]


class Measured(Struct, kw_only=True):
    """A line of samples.jsonl but for `HEAVY`. Times in seconds, sizes in bytes; `evictbench.store.frame.COLUMNS` says
    the rest. Published samples leave out text, token ids and times."""

    task: Name
    doc_id: Count
    repeat: Count
    score: Share
    metrics: dict[str, Number]
    answer: str | UnsetType | None = UNSET
    thinking: Literal["none", "closed", "unclosed"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    output_tokens: Count
    token_limit: Count
    truncated: bool
    repetition: bool
    prompt_tokens: Count
    border: Count | UnsetType | None = UNSET
    prompt_hash: Name
    occupancy_max: Count
    occupancy_mean: Amount
    cache_bytes: Count
    prefill_peak_bytes: Count
    prefill_seconds: Amount | UnsetType | None = UNSET
    first_token_seconds: Amount | UnsetType | None = UNSET
    decode_seconds: Amount | UnsetType | None = UNSET
    decode_steps: Count
    session: Count
    recency: Recency | UnsetType = UNSET

    def __post_init__(self) -> None:
        for name, value in self.metrics.items():
            low, high = METRICS.get(name, (-MOST, MOST))
            if not low <= value <= high:
                raise ValueError(f"The metric {name} is {value:g}, and is from {low:g} to {high:g}")
        if self.metrics.get("score", self.score) != self.score:
            raise ValueError(f"The score is {self.score:g}, and the metric score {self.metrics['score']:g}")


class Sample(Measured, kw_only=True):
    """A line of samples.jsonl, whole."""

    by_position: dict[str, list[Number]] | UnsetType = UNSET
    tokens: list[Count] | UnsetType = UNSET
    prompt_ids: str | UnsetType | None = UNSET
    recency_by_head: list[list[Share | None]] | UnsetType = UNSET


HEAVY = ("by_position", "tokens", "prompt_ids", "recency_by_head")
"""The fields of a sample that take the most room."""


class PolicyEntry(Struct, kw_only=True):
    """The policy of a run. label: the name with the settings that differ from their defaults. source: the hash of its
    file. weights: what tells a learned policy's weights. stated_length: tokens that an absolute budget of a policy with
    a threshold is divided by."""

    name: Name
    label: Name
    settings: dict[str, Any]
    source: str | None = None
    weights: dict[str, Any] | None = None
    stated_length: Amount | None = None

    def __post_init__(self) -> None:
        if self.label.partition(":")[0] != self.name:
            raise ValueError(f"The policy's label is {self.label!r}, and its name {self.name!r}")


class ProtocolEntry(Struct, kw_only=True):
    """How a run was made; `evictbench.store.select.PROTOCOL` says what each field is."""

    name: str | None = None
    context: Count | None = None
    question: str | None = None
    chat: bool | None = None
    thoughts: bool | None = None
    system_prompt: str | None = None
    temperature: Amount | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    max_new_tokens: str | Count | None = None
    card_limit: Count | None = None
    prefill: str | None = None
    chunk: Positive | None = None
    differs: list[str] = []


class BaseModel(Struct, kw_only=True):
    """What a model was fine-tuned from. sha256: the hash of the base's weights. policy: the label of the policy that it
    was trained under. A model that was trained elsewhere may state its base's name alone."""

    name: Name
    sha256: Name | None = None
    policy: Name | None = None


class Identity(Struct, kw_only=True):
    """Everything that the fingerprint of a run is made of. base_model: of a fine-tuned model alone."""

    suite: Name
    tasks: dict[str, Scalar]
    data: dict[str, Scalar]
    policy: PolicyEntry
    budget: str | None
    protocol: ProtocolEntry
    seed: int
    model: Name
    weights: str | None
    dtype: Name
    base_model: BaseModel | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.budget is not None:
            try:
                written = str(Budget.parse(self.budget))
            except UserError:
                written = ""
            if written != self.budget:
                raise ValueError(f"The budget is {self.budget!r}")


class Run(Struct, kw_only=True):
    """A run.json."""

    results_version: Positive
    fingerprint: Annotated[str, Meta(pattern="^[0-9a-f]{12}$")]
    identity: Identity
    sessions: list[dict[str, Any]]


class SummaryRow(Struct, kw_only=True):
    """The fields of a summary's row that are read again."""

    samples: Positive
    prompt_tokens: Amount
    output_tokens: Amount
    prefill_seconds: Amount
    decode_seconds: Amount


class Summary(Struct, kw_only=True):
    """The fields of a summary.json that are read again."""

    identity: Identity
    mean: SummaryRow | None


class TracedCell(Struct, kw_only=True):
    """A cell of a trace, with the numbers of its line that are shown. Those of a cell without memory are not there."""

    cell: Count
    policy: Name
    budget: str | None
    context: Positive
    rows: Positive
    status: Literal["ok", "out of memory"]
    copy_bandwidth: Amount
    first_token_seconds: Amount | None = None
    decode_ms: Amount | None = None
    read_bytes_per_second: Amount | None = None
    decode_cache_bytes: Amount | None = None
    decode_peak_bytes: Amount | None = None

    def __post_init__(self) -> None:
        shown = ("decode_ms", "read_bytes_per_second", "decode_cache_bytes", "decode_peak_bytes")
        missing = [name for name in shown if getattr(self, name) is None]
        if self.status == "ok" and missing:
            raise ValueError(f"A cell that is ok has no {missing[0]}")


class TracedPolicy(Struct, kw_only=True):
    """A policy of a trace. weights: where they come from."""

    settings: dict[str, Any]
    weights: str | None


class Trace(Struct, kw_only=True):
    """A trace.json. Sizes in bytes, and bytes per second."""

    model: str = ""
    device: str = ""
    made_by: dict[str, Any] = {}
    policies: dict[str, TracedPolicy] = {}
    cells: list[TracedCell] = []
    copy_bandwidth: Amount = 0
    read_weight_bytes: Amount = 0


class CardShape(Struct, kw_only=True, forbid_unknown_fields=True):
    """The shape of the model that a policy's weights were trained on: `evictbench.policy.step.ModelShape`."""

    layers: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    hidden_size: Count = 0


class CardModel(Struct, kw_only=True):
    """The model that a policy's weights were trained on; others' weights have no hash of it."""

    name: Name
    sha256: str | None = None
    shape: CardShape


class PolicyCard(Struct, kw_only=True):
    """The config.json beside a policy's weights. The rest of it is the policy's own."""

    policy: Name
    variant: str
    base_model: CardModel
    transferable: bool = False
    settings: dict[str, Any] | None = None
    calibration: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    finetuned: dict[str, Any] = {}


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError, with the file's name, for anything else."""
    with open_file(file) as stream:
        data = stream.read(LONGEST_LINE + 1)
    if len(data) > LONGEST_LINE:
        raise UserError(f"{file} is longer than {LONGEST_LINE:,} bytes, so it is none of ours.")
    try:
        return _whole(data)
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}).") from None


def checked(content: object, kind: type[Kind]) -> Kind:
    """The content as that record. Raises ValueError, which says what is wrong where."""
    try:
        return msgspec.convert(content, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(_said(error)) from None


def parse_sample(line: bytes, fingerprint: str, light: bool = False) -> dict[str, Any]:
    """A line of samples.jsonl, checked, without its checksum. Raises ValueError, which says what is wrong.

    fingerprint: of the run that the line is in. light: whether to leave out `HEAVY` and what is not known.
    """
    ending = _CHECKSUM.search(line, max(0, len(line) - 64))
    if ending is not None and _crc(line[: ending.start()], fingerprint) != int(ending[1], 16):
        raise ValueError("its checksum is another, so it was changed, or is another run's")
    content: dict[str, Any]
    if light and ending is not None:  # as it was written
        with suppress(*UNREADABLE):
            return dict(msgspec.to_builtins(_decode_measured(line)))
    try:
        content = _decode(line)
        # A line that is as it was written has no key twice; in others, the colons after quotes are counted.
        plain = type(content) is dict and (ending is not None or len(_KEY.findall(line)) == _keys(content))
    except UNREADABLE:
        plain = False
    if not plain:
        content = _whole(line)
    if content.pop(CHECKSUM, None) is not None and ending is None:
        raise ValueError("its checksum is not at its end")
    checked(content, Sample)
    for name in HEAVY if light else ():
        content.pop(name, None)
    return content


def is_json(line: bytes) -> bool:
    """Whether a line is whole, whatever it says: one that was cut off is not."""
    try:
        json.loads(line, parse_int=str, parse_float=str)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def sample_line(sample: Mapping[str, Any], fingerprint: str) -> bytes:
    """A sample of a run as a line of samples.jsonl, with its checksum."""
    text = json.dumps({name: sample[name] for name in sample if name != CHECKSUM}, ensure_ascii=False, allow_nan=False)
    start = text[:-1].encode(errors="surrogatepass")
    return start + f', "{CHECKSUM}": "{_crc(start, fingerprint):08x}"}}\n'.encode()


def _crc(line: bytes, fingerprint: str) -> int:
    return zlib.crc32(line, zlib.crc32(fingerprint.encode()))


_decode = msgspec.json.Decoder().decode
_decode_measured = msgspec.json.Decoder(Measured).decode


def _whole(data: bytes) -> dict[str, Any]:
    """A JSON object, each key once. Text may hold half a surrogate pair, which a tokenizer can make."""
    try:
        content = json.loads(
            data.decode("utf-8", errors="surrogatepass"), object_pairs_hook=_each_once, parse_constant=_no_number
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg.lower()}, letter {error.pos + 1}") from None
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return content


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _keys(content: Any) -> int:
    """The number of keys in a JSON value, at any depth."""
    if type(content) is dict:
        return len(content) + sum(_keys(value) for value in content.values() if type(value) in (dict, list))
    return sum(_keys(value) for value in content if type(value) in (dict, list))


def _said(error: Exception) -> str:
    """msgspec's message in words: "expected `float` <= 1.0 at score"."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    text = re.sub(r" - at `\$\.?([^`]*)`", r" at \1", str(error)).replace("`", "")
    return text[:1].lower() + text[1:]
