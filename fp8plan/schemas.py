"""The schemas of the files that fp8plan writes, their versions, and the check of what is read back.

plan            fp8plan.model.plan.plan.Plan: one JSON object
profile         fp8plan.model.profile.profile.Profile: one JSON object
rollout record  RolloutRecord: one JSON object a line
run record      RunRecord, which is a rollout record, too: one JSON object a line, for every step of a Monitor
probe           the result of Probe.to_dict: one JSON object, which fp8plan does not read back

A class is a schema: msgspec checks the content of a file against the fields of the dataclass or Struct, and their
types. Other fields are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import EnumType
from inspect import isclass
from types import NoneType
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.version import __version__

T = TypeVar("T")

# MAJOR.MINOR, the field "schema_version" of a file. A new field is a new minor version, and older readers ignore it. If
# a field goes, or changes its meaning, that is a new major version, which they refuse.
VERSIONS: Final = {"plan": "1.9", "profile": "1.1", "record": "1.11", "probe": "1.2"}
FIRST: Final = "1.0"  # the version of files that name none

# The fields of a rollout record with a number for each request. They are most of a line.
LENGTHS: Final = ("prompt_lengths", "response_lengths", "prompt_ids", "turns")
# The fields that a rollout record needs. Any other that is absent or null takes vLLM's default.
REQUIRED: Final = ("model", "gpu", "engine_version", "precision", "prompt_lengths", "response_lengths", "seconds")
QUIET_HOST: Final = 1.25  # host_slowdown up to which a core is quiet; a busy hyperthread beside it makes 1.7 to 2


class RolloutRecord(msgspec.Struct, kw_only=True):
    """One warm `generate()` of a whole batch. Only types are checked here; the code that uses a value checks the value.

    kv_cache_tokens, max_cudagraph_capture_size: null: vLLM's own; a number: imposed
    measured_kv_cache_tokens: blocks of the engine's pool times its block_size, which vLLM enlarges for some models
    num_gpu_blocks:  blocks of the engine's pool, the null block among them
    keep_bf16:       first and last layers that kept their linears in BF16, and perhaps "o_proj"; null: none
    experts_hit:     distinct experts of a layer that each step's tokens went to, if known
    prompt_lengths, response_lengths: tokens of each response: of its prompt, and those that the engine generated
    turns:           turns of each response as [generated, tool, wait_s]: tokens that the engine generated, tokens that
                     a tool or a user added then, and seconds until the next request (null: not known). Nothing counts
                     after a last turn. null: each response has one turn
    concurrent:      with turns: most trajectories at once, of which the next begins when one ends; null: all begin at
                     the start
    unclear_responses: number of responses whose turns are not known: they have one, and all tokens count as generated;
                     null: none
    prompt_ids:      one number per response, equal where the prompt is the same; null: none share one
    prefix_cache_queries, prefix_cache_hits, rewritten_tokens: as in fp8plan.Observation
    compiled_files:  kernels that were compiled meanwhile
    host_loop_s:     seconds of 20,000 turns of an empty loop of Python on the cores of front end and engine, the slower
                     (in a run file: as `fp8plan doctor --host`, at most a day before the engine started)
    host_slowdown:   the same as a multiple of a quiet core's
    seconds:         wall time; null in the record of a training step that had no rollout
    first_rollout:   true: the first rollout that its writer saw, perhaps of an engine that had not compiled yet
    routed_experts:  the engine returned the experts of each token; null: it did not
    sampling:        the rollout's sampling parameters (fp8plan.Sampling, field by field); null: not known
    inside:          the program that called the engine, as in `fp8plan plan --inside`; null: own
    delta_bytes:     bytes of the sync before, if it sent all that had changed and nothing else
    """

    model: str | None = None
    gpu: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    precision: str | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    expert_parallel: bool | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    enforce_eager: bool | None = None
    routed_experts: bool | None = None
    kv_cache_tokens: int | None = None
    prompt_lengths: list[int] | None = None
    response_lengths: list[int] | None = None
    prompt_ids: list[Any] | None = None
    turns: list[list[tuple[int, int, float | None]]] | None = None
    concurrent: int | None = None
    unclear_responses: int | None = None
    seconds: float | None = None
    compiled_files: int | None = None
    host_loop_s: float | None = None
    host_slowdown: float | None = None
    preemptions: int | None = None
    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None
    rewritten_tokens: int | None = None
    measured_kv_cache_tokens: int | None = None
    num_gpu_blocks: int | None = None
    max_cudagraph_capture_size: int | None = None
    keep_bf16: tuple[int | str, ...] | None = None
    experts_hit: int | None = None
    first_rollout: bool | None = None
    sampling: dict[str, Any] | None = None
    inside: str | None = None
    delta_bytes: int | None = None


# A long run has a million of the parts below. They hold no circles, so the garbage collector may skip them.
class Span(msgspec.Struct, gc=False):
    """The KL of the tokens from position `first` of their response on, up to the next span."""

    first: int
    tokens: float
    k3: float | None = None


class Cause(msgspec.Struct, gc=False):
    """One cause of a slow rollout: its kind, and a sentence."""

    cause: str | None = None
    sentence: str | None = None


class Verdict(msgspec.Struct, gc=False):
    """The guard's verdict on one rollout.

    as_fast:  null if a slow rollout was not judged, because measured rollouts had not yet corrected the prediction
    anchored: true if measured rollouts had corrected the prediction
    """

    action: str | None = None
    reason: str | None = None
    as_fast: bool | None = None
    cold: bool | None = None
    anchored: bool | None = None
    causes: list[Cause] | None = None


class GuardState(msgspec.Struct, gc=False):
    """The guard's state on the ladder of precisions: the deepest rung that was advised, and the one that was taken."""

    rung: str | None = None
    taken: str | None = None


class Judged(msgspec.Struct, gc=False):
    """The guard's part of a record. off: the reason why there is no verdict"""

    verdict: Verdict | None = None
    state: GuardState | None = None
    off: str | None = None


class KlPart(msgspec.Struct):
    """A part of the KL, in nats per token, and its cause. Several causes may share a part."""

    causes: list[str]
    kl: float | None = None
    low: float | None = None
    high: float | None = None
    how: str | None = None


class RunRecord(RolloutRecord, kw_only=True):
    """The record that a Monitor writes for each step, one flat JSON object.

    step, date:       number and UTC time of the step
    metrics:          name -> number or null; verl's name where verl has one ("rollout_corr/..."), else "fp8plan/..."
    thresholds:       {"tis": C or null, "band": [low, high] or null}: on pi_train/pi_rollout
    decision, reason: the controller's, with `alarms` (words)
    escalate:         request for more than thresholds: null, "recalibrate_kv" or "step_down"
    profile:          KL by position in the response
    versions:         the same by weight version, under the version
    attribution:      the parts of the KL by cause
    guard:            null without one
    resumed:          true: the run went on from a checkpoint here, and replaces what the file has of these steps
    """

    step: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    metrics: dict[str, float | None]
    date: str | None = None
    thresholds: dict[str, Any] | None = None
    decision: str | None = None
    reason: str | None = None
    alarms: list[str] | None = None
    escalate: str | None = None
    profile: list[Span] | None = None
    versions: dict[str, Any] | None = None
    attribution: list[KlPart] | None = None
    guard: Judged | None = None
    resumed: bool | None = None


# Names of metrics in a run record: verl's where verl has one.
REWARD: Final = "critic/rewards/mean"  # from the training loop, which may give it to Monitor.step
K3: Final = "rollout_corr/k3_kl"
K3_ROBUST: Final = "fp8plan/k3_robust"
SMOOTHED: Final = "fp8plan/kl_smoothed"
KL_LIMIT: Final = "fp8plan/kl_limit"
BASELINE: Final = "fp8plan/kl_baseline"
NEWS: Final = "fp8plan/kl_news"  # KL / baseline
ESS: Final = "rollout_corr/rollout_is_eff_sample_size"
ESS_RAW: Final = "fp8plan/ess_raw"
TIS: Final = "fp8plan/threshold_tis"
BAND_LOW: Final = "fp8plan/threshold_low"
BAND_HIGH: Final = "fp8plan/threshold_high"
CLIP_FRACTION: Final = "fp8plan/clip_fraction"
CLIPPED_MASS: Final = "fp8plan/clipped_mass"
LOST_TOKENS: Final = "fp8plan/lost_tokens"
ROUTING_DIFFERS: Final = "fp8plan/routing_differs"  # share of the tokens with another expert in at least one layer
LOST_SEQUENCES: Final = "fp8plan/lost_sequences"
LOST_WEIGHT: Final = "fp8plan/lost_weight"
TOKENS_PER_S: Final = "fp8plan/tokens_per_s"
PREDICTED: Final = "fp8plan/predicted_tokens_per_s"
PREDICTED_LOW: Final = "fp8plan/predicted_tokens_per_s_low"
PREDICTED_HIGH: Final = "fp8plan/predicted_tokens_per_s_high"
# The metrics that `fp8plan monitor` and `report` show.
SHOWN: Final = (
    REWARD, K3, K3_ROBUST, KL_LIMIT, BASELINE, NEWS, ESS, ESS_RAW, TIS, BAND_LOW, BAND_HIGH, CLIP_FRACTION,
    CLIPPED_MASS, LOST_TOKENS, ROUTING_DIFFERS, TOKENS_PER_S, PREDICTED, PREDICTED_LOW, PREDICTED_HIGH,
)  # fmt: skip


def parse(text: str | bytes, where: str, error: type[Fp8PlanError] = ConfigError, finite: bool = True) -> Any:
    """Parse JSON text, in UTF-8, with or without a byte order mark.

    finite: NaN and Infinity are errors; else they are floats

    Raises `error`, which begins with `where`, if it is not JSON.
    """
    try:
        text = (text if isinstance(text, str) else text.decode("utf-8")).removeprefix("\ufeff")
        return (_FINITE if finite else _ANY).decode(text)
    except (ValueError, RecursionError) as wrong:
        raise error(f"{where} is not JSON: {wrong}") from None


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"it holds {word}; allowed: finite numbers, or null")


_FINITE: Final = json.JSONDecoder(parse_constant=_no_number)
_ANY: Final = json.JSONDecoder()


def check_version(data: Any, what: str, where: str, error: type[Fp8PlanError] = ConfigError) -> None:
    """Raise `error` unless `data` is an object with a version of the schema `what` that this fp8plan reads."""
    if not isinstance(data, Mapping):
        word = KINDS.get(type(data), "")
        raise error(f"{where} is {WORDS.get(word, type(data).__name__)}; allowed: a JSON object")
    version, ours = data.get("schema_version", FIRST), VERSIONS[what].partition(".")[0]
    if not isinstance(version, str) or not re.fullmatch(r"\d+\.\d+", version):
        raise error(f"{where}: schema_version is {version!r}; allowed: text such as {VERSIONS[what]!r}")
    major = version.partition(".")[0]
    if major != ours:
        writer = f", written by fp8plan {data['fp8plan_version']}" if "fp8plan_version" in data else ""
        todo = "type: pip install --upgrade fp8plan" if int(major) > int(ours) else "install the version that wrote it"
        raise error(
            f"{where} has schema {version}{writer}; this is fp8plan {__version__}, which reads schema {ours}.x: {todo}"
        )


def checked(data: Any, kind: type[T], where: str, error: type[Fp8PlanError] = ConfigError) -> T:
    """Convert JSON data from a file to a `kind`.

    Raises `error`, which begins with `where` and names the field, its value and the allowed ones.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as problem:
        raise error(f"{where}: {_explained(problem, data, kind)}") from None
    except Fp8PlanError as problem:
        raise error(f"{where}: {problem}") from None


WORDS: Final = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "null": "null",
    "array": "a list", "object": "an object with named fields",
}  # fmt: skip
KINDS: Final = {int: "int", float: "float", str: "str", bool: "bool", NoneType: "null", list: "array", dict: "object"}


def _explained(error: msgspec.ValidationError, data: Any, kind: Any) -> str:
    """msgspec's error in our words, with the offending value, which msgspec leaves out."""
    message, _, path = str(error).partition(" - at `$")
    expected = re.match(r"Expected `([^`]*)`([^,]*)(?:, got `?(\w+))?", message)
    missing = re.match("Object missing required field `(.*)`", message)

    def meant(value: Any) -> bool:
        if missing:
            return isinstance(value, dict) and missing[1] not in value
        if expected:
            return expected[3] in (KINDS.get(type(value)), str(len(value)) if isinstance(value, list) else "")
        return isinstance(value, int) and not is_number(value)  # too large

    ends = _ends(path, data)
    place, value = next((end for end in ends if meant(end[1])), ends[0])
    if isinstance(error.__cause__, Fp8PlanError):  # a check of the class's own
        return f"{place}: {error.__cause__}" if place else str(error.__cause__)
    if missing:
        return f"field {f'{place}.{missing[1]}'.lstrip('.')!r} is missing"
    allowed = "a finite number"
    if expected:
        allowed = " or ".join(WORDS.get(x, x) for x in expected[1].split(" | ")) + expected[2]
    elif message.startswith("Invalid enum value"):
        for name in re.findall(r"\.(\w+)", path):
            hints = map(get_type_hints, filter(isclass, (kind, *get_args(kind))))  # of the entries of a list, too
            kind = next(fields[name] for fields in hints if name in fields)
        allowed = ", ".join(_choices(kind))
    shown = repr(value)
    return f"{place or 'it'} is {shown if len(shown) <= 60 else f'{shown[:57]}...'}; allowed: {allowed}"


def _choices(kind: Any) -> list[str]:
    """The values that a Literal, a union with one, or an enum allows."""
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    if isinstance(kind, EnumType):
        return list(map(str, list[Any](kind)))
    if kind is NoneType:
        return ["null"]
    return [choice for part in get_args(kind) for choice in _choices(part)]


def _ends(path: str, data: Any) -> list[tuple[str, Any]]:
    """Every (place, value) in `data` that msgspec's `path` can mean: its "[...]" is any entry of a mapping."""
    ends: list[tuple[str, Any]] = [("", data)]
    for name, number, any_key in re.findall(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]", path):
        steps = []
        for place, value in ends:
            if any_key and isinstance(value, dict):
                steps += [(f"{place}[{key!r}]", x) for key, x in value.items()]
            elif name and isinstance(value, dict) and name in value:
                steps.append((f"{place}.{name}", value[name]))
            elif number and isinstance(value, list) and int(number) < len(value):
                steps.append((f"{place}[{number}]", value[int(number)]))
        ends = steps
    return [(place.lstrip("."), value) for place, value in ends]
