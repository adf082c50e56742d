"""Rollout records, one JSON object a line: the engine, the lengths and the seconds of a rollout.

The keys are those of fp8plan.schemas.RolloutRecord; the Monitor and the measurement scripts write them. Unknown keys
are kept, and missing ones take vLLM's default. A record is read as a workload to plan, or as a measurement to validate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8plan.checks import whole
from fp8plan.errors import ConfigError, Fp8PlanError, some
from fp8plan.jsonl import TORN, lines, torn_note
from fp8plan.model.cost.front import OWN
from fp8plan.model.distributions import MOST_SECONDS, MOST_TOKENS, Distribution, Trace
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import RECORDED, EngineLimits
from fp8plan.model.profile.profile import ENGINE
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.setup import EngineSetup, check_inside
from fp8plan.model.turn_table import NO_WAITS, TurnTable
from fp8plan.model.workload import Batch, Workload
from fp8plan.model.workload_turns import LoggedTurns
from fp8plan.schemas import LENGTHS, REQUIRED, RolloutRecord, check_version, checked

NO_ROLLOUT: Final = "a Monitor knows rollouts from its engine, or from step(..., rollout=...)"
WARMING: Final = "it compiles and fills caches, and predictions are of warm engines"
COUNT_IT: Final = "--include-first counts it"
WAITS_INSIDE: Final = f"{NO_WAITS}, and its seconds hold those waits"
A_TURN: Final = "[generated, tool, wait_s], such as [300, 1200, 2.5], or null for a wait that is not known"
# Lists of the requests of a record -> one with two responses, as it is typed.
LISTS: Final = {
    "prompt_lengths": "[64, 80]",
    "response_lengths": "[380, 200]",
    "prompt_ids": "[0, 1]",
    "turns": "[[[300, 1200, 2.5], [80, 0, 0]], [[200, 0, 0]]]: tokens generated, a tool's tokens, its seconds",
}
# A change in one of these fields, from record to record, means a new engine.
OF_ENGINE: Final = ("model", "engine_version", "precision", "keep_bf16", "gpu", "inside", *RECORDED)


def batch_of(fields: Mapping[str, Any]) -> Batch:
    """The requests of a rollout record. fields: of a RolloutRecord, by name

    Raises ConfigError for a list of another form, for impossible lengths and turns, and for turns whose tokens do not
    add up to the response lengths.
    """
    for name, example in LISTS.items():
        check_list(name, fields.get(name), example)
    prompts, responses = (_tokens(name, fields.get(name)) for name in ("prompt_lengths", "response_lengths"))
    ids, numbers = fields.get("prompt_ids"), np.arange(len(prompts))
    if ids is not None:
        numbers = np.unique(list(map(str, ids)), return_inverse=True)[1].astype(np.int64)
    if not len(prompts) == len(responses) == len(numbers):
        counts = f"{len(prompts)} prompt_lengths, {len(responses)} response_lengths, {len(numbers)} prompt_ids"
        raise ConfigError(f"{counts}; allowed: as many of each")
    turns = fields.get("turns")
    try:
        table = None if turns is None else _turns_of(turns, fields["response_lengths"], fields.get("concurrent"))
    except ConfigError:
        raise
    except (TypeError, ValueError):  # a list in it, or a number, is of another form
        raise _another_form("turns", turns, LISTS["turns"]) from None
    return Batch(prompts, responses, numbers, table)


def check_list(name: str, value: Any, example: str) -> None:
    """Raise ConfigError for a value that is neither a list nor None. example: one, as it is typed"""
    if value is not None and (isinstance(value, str) or not hasattr(value, "__len__")):
        raise _another_form(name, value, example)


def _another_form(name: str, value: Any, example: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r:.60}; allowed: a list, such as {example}")


def _turns_of(turns: Sequence[Any], responses: Sequence[int], concurrent: Any) -> TurnTable:
    """The turns of responses. Raises ConfigError as `batch_of` does, and TypeError or ValueError for another form."""
    if len(turns) != len(responses):
        counts = f"{len(turns)} turns, {len(responses)} response_lengths"
        raise ConfigError(f"{counts}; allowed: a list of turns for each response")
    for number, (trajectory, tokens) in enumerate(zip(turns, responses, strict=True), 1):
        for generated, tool, wait_s in trajectory:
            waits = wait_s is None or 0 <= wait_s <= MOST_SECONDS
            if not (1 <= generated <= MOST_TOKENS and 0 <= tool <= MOST_TOKENS and waits):
                raise ConfigError(f"a turn of response {number} is {[generated, tool, wait_s]}; allowed: {A_TURN}")
        total = sum(turn[0] for turn in trajectory)
        if total != tokens:
            raise ConfigError(
                f"response {number} has {total:,} tokens in its turns, {tokens:,} in response_lengths; allowed: equal"
            )
    if concurrent is not None:
        whole("concurrent", concurrent, otherwise=", or null")
    return TurnTable.of(turns)._replace(concurrent=concurrent)


def recorded_workload(
    path: str | Path,
    tool_s: Distribution | float | None = None,
    concurrent: int | None = None,
    reasoning_share: float = 0.0,
) -> tuple[Workload, list[str]]:
    """Read the workload of the last rollout in a file of rollout records. Returns (workload, notes).

    The file is a Monitor's run file, the output of `fp8plan import`, or measured records. Seconds, model and GPU are
    not needed. Responses grow as a policy learns, so the last rollout is the best guess of the next.

    tool_s:                      seconds that a tool takes, where the record has turns without waits
    concurrent, reasoning_share: as in Turns; concurrent=None: as in the record

    Raises ConfigError, naming the line, for a file without a rollout, for impossible lengths, and for turns whose
    waits are neither known nor given.
    """
    file = Path(path)
    read = list(lines(file, "file of rollout records"))
    torn = [torn_note(number, file) for number, fields in read if fields is TORN]
    whole = read[: len(read) - len(torn)]
    for number, fields in reversed(whole):
        where = f"line {number} of {file}"
        check_version(fields, "record", where)
        if fields.get("response_lengths") is None:  # a Monitor's step that had no rollout
            continue
        checked(fields, RolloutRecord, where)
        try:
            workload, notes = workload_of(batch_of(fields), where, tool_s, concurrent, reasoning_share)
            unclear = unclear_of(fields)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        return workload, notes + ([f"{where}: {unclear}"] if unclear else []) + torn
    none = f"no line of {file} has prompt_lengths and response_lengths"
    if any(is_of_monitor(fields) for _, fields in whole):
        raise ConfigError(f"{none}: {NO_ROLLOUT}; give a run file that has them, or the output of `fp8plan import`")
    raise ConfigError(
        f"{none}; give the output of `fp8plan import`, or the run file of a Monitor. A trace of one length per line is "
        "for --response-lengths"
    )


def unclear_of(fields: Mapping[str, Any]) -> str:
    """A sentence on the responses of a record whose turns are not known; "" without any.

    Raises ConfigError for an impossible number of them.
    """
    unclear, responses = fields.get("unclear_responses") or 0, len(fields["response_lengths"])
    if not 0 <= unclear <= responses:
        raise ConfigError(f"unclear_responses is {unclear}; allowed: 0 to {responses}, the number of responses")
    if not unclear:
        return ""
    share = f"{unclear / responses:.1%} of the responses"
    return f"in {share} the log cannot tell tool output from generated tokens, so their lengths may count it"


def is_of_monitor(fields: Mapping[str, Any]) -> bool:
    """True for a Monitor's record of a step."""
    return isinstance(fields.get("metrics"), Mapping)


def workload_of(
    batch: Batch,
    source: str,
    tool_s: Distribution | float | None = None,
    concurrent: int | None = None,
    reasoning_share: float = 0.0,
) -> tuple[Workload, list[str]]:
    """Turn requests into a workload in which every prompt has equally many samples. Returns (workload, notes).

    Prompts with unequally many, as after a lost response, are split into as few parts of equal size as possible. The
    parts share no prefix, and a note says so.

    tool_s, concurrent, reasoning_share: as in `recorded_workload`

    Raises ConfigError for these three beside requests of one turn, and as LoggedTurns does.
    """
    _, first, ids, counts = np.unique(batch.prompt_ids, return_index=True, return_inverse=True, return_counts=True)
    samples = math.gcd(*counts.tolist())
    order = np.argsort(first[ids], kind="stable")  # prompt by prompt, in order of arrival
    notes = []
    if counts.min() < counts.max():
        notes.append(
            f"{source}: its {len(counts)} prompts have {counts.min()} to {counts.max()} responses; planned as "
            f"{len(ids) // samples} prompts x {samples}, which share no prefix with each other"
        )
    prompts = Trace(tuple(batch.prompts[order].tolist()), source)
    if batch.turns is not None:
        turns = LoggedTurns(batch.turns.take(order), source, tool_s, concurrent, reasoning_share)
        return Workload(len(ids) // samples, samples, prompts, turns=turns), notes
    of_turns = {"--tool-s": tool_s, "--concurrent": concurrent, "--reasoning-share": reasoning_share or None}
    if typed := [option for option, value in of_turns.items() if value is not None]:
        raise ConfigError(f"{', '.join(typed)}: the responses have one turn each; leave it out")
    responses = Trace(tuple(batch.responses[order].tolist()), source)
    return Workload(len(ids) // samples, samples, prompts, responses), notes


def _tokens(name: str, lengths: Sequence[int] | None) -> NDArray[np.int64]:
    allowed = f"allowed: a list of whole numbers of tokens, 1 to {MOST_TOKENS:,}"
    if lengths is None or not len(lengths):
        raise ConfigError(f"{name} is empty; {allowed}")
    try:
        values = np.asarray(lengths)
    except ValueError:  # lists of several lengths
        values = np.empty((0, 0))
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ConfigError(f"{name} is {str(lengths)[:60]}; {allowed}")
    wrong = values[(values < 1) | (values > MOST_TOKENS)]
    if wrong.size:
        raise ConfigError(f"{name} has {wrong[0]}; {allowed}")
    return values.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Record:
    """One measured warm `generate()` of a whole batch.

    batch, limits: the requests and the engine; limits.num_gpu_blocks is set if the record imposes kv_cache_tokens
    seconds:       measured wall time
    group:         same workload, GPU and limits, whatever the precision and KV size
    fields:        the record as read, unknown keys included
    """

    line: int
    batch: Batch
    limits: EngineLimits
    seconds: float
    group: str
    fields: dict[str, Any]

    @property
    def setup(self) -> EngineSetup:
        """The engine that ran. Raises ConfigError for a model, GPU or precision that fp8plan does not know."""
        return EngineSetup(
            self.fields["model"],
            self.fields["gpu"],
            self.fields["precision"],
            self.limits,
            caller_of(self.fields),
            self.fields["engine_version"],
            Remedies(keep_bf16=self.fields.get("keep_bf16") or (0, 0)),
        )


def read_records(path: str | Path, include_first: bool = False) -> list[Record]:
    """The records of a JSONL file, as `read_run` reads them.

    Raises ConfigError naming the line and the field that cannot be used.
    """
    return read_run(path, include_first).compared()


class Run(NamedTuple):
    """A file of records as read.

    records:         the rollouts
    without_rollout: the number of lines of steps without a rollout, which are not in `records`
    torn:            a note on a last line that breaks off, as in a run that is being written, or was killed
    first:           lines and steps of the first rollouts of an engine that are not in `records`
    without_waits:   lines and steps of rollouts of turns with unknown waits, which are not in `records`
    """

    records: list[Record]
    without_rollout: int
    torn: str | None
    first: list[tuple[int, Any]]
    without_waits: list[tuple[int, Any]]

    def compared(self) -> list[Record]:
        """The rollouts. Raises ConfigError if there are none, as no waits of turns are known."""
        if not self.records:
            raise ConfigError(
                f"no rollout can be compared: {NO_WAITS} in {_steps(self.without_waits)}; "
                "give the seconds of each turn's wait, [generated, tool, wait_s]"
            )
        return self.records

    @property
    def notes(self) -> list[str]:
        """Sentences on the lines that were left out."""
        lines = len(self.records) + self.without_rollout + len(self.first) + len(self.without_waits)
        steps = f"{self.without_rollout} of {lines} lines are left out: a Monitor's steps without a rollout"
        sentences = [steps] if self.without_rollout else []
        if self.first:
            are = "is left out, the first rollout" if len(self.first) == 1 else "are left out, the first rollouts"
            sentences.append(f"{_steps(self.first)} {are} of an engine: {WARMING}; {COUNT_IT}")
        if self.without_waits:
            left_out = "is left out" if len(self.without_waits) == 1 else "are left out"
            sentences.append(f"{_steps(self.without_waits)} {left_out}: {WAITS_INSIDE}")
        unclear = [record for record in self.records if record.fields.get("unclear_responses")]
        if unclear:
            steps = _steps([(record.line, record.fields.get("step")) for record in unclear])
            sentences.append(f"{steps}: the log cannot tell if some tokens are tool output; they count as generated")
        return [*sentences, *([self.torn] if self.torn else [])]


def _steps(first: list[tuple[int, Any]]) -> str:
    return some([f"line {line}" if step is None else f"step {step}" for line, step in first])


def read_run(path: str | Path, include_first: bool = False) -> Run:
    """The records of a JSONL file, and notes on the lines that were left out.

    The first rollout of an engine is left out unless `include_first`: it holds compilation and warm-up. It has the
    field `first_rollout`, or is found by `_begins` in a Monitor's records. Records that were measured one by one are
    warm. Rollouts of turns are left out if their waits are not known.

    Raises ConfigError naming the line and the field that cannot be used, and for a run of only first rollouts.
    """
    file = Path(path)
    records, without_rollout, torn = list[Record](), 0, None
    first, without_waits = list[tuple[int, Any]](), list[tuple[int, Any]]()
    before: dict[str, Any] | None = None  # the Monitor's record before
    for number, fields in lines(file, "record file"):
        if fields is TORN:
            torn = torn_note(number, file)
            break
        where = f"line {number} of {file}"
        check_version(fields, "record", where)
        if is_of_monitor(fields) and fields.get("seconds") is None:  # it trained on earlier samples
            without_rollout += 1
            continue
        record = record_of(fields, number, where)
        first_of_writer = fields.get("first_rollout") is True
        begins = first_of_writer or (is_of_monitor(fields) and _begins(fields, before))
        if is_of_monitor(fields):
            before = {name: value for name, value in fields.items() if name not in LENGTHS}
        if begins and not include_first:
            first.append((number, fields.get("step")))
        elif record.batch.turns is not None and not record.batch.turns.has_waits:
            without_waits.append((number, fields.get("step")))
        else:
            records.append(record)
    if without_waits:
        return Run(records, without_rollout, torn, first, without_waits)
    if first and not records:
        raise ConfigError(
            f"{file} has only {_steps(first)}, the first of an engine: {WARMING}; let the run go on, or give "
            "--include-first (include_first=True)"
        )
    if without_rollout and not records:
        steps = f"{without_rollout} steps of a Monitor without a rollout"
        raise ConfigError(f"{file} has no records, only {steps}; {NO_ROLLOUT}")
    if not records:
        raise ConfigError(f"{file} has no records; it needs one JSON object per line")
    return Run(records, without_rollout, torn, first, without_waits)


def _begins(fields: Mapping[str, Any], before: Mapping[str, Any] | None) -> bool:
    """True if a Monitor's rollout was the first of an engine.

    It is the first of the file, its engine is another than before (as after a step down), or the guard calls it cold.
    """
    if before is None or any(fields.get(name) != before.get(name) for name in OF_ENGINE):
        return True
    guard: Any = fields.get("guard")
    verdict = guard.get("verdict") if isinstance(guard, Mapping) else None
    return isinstance(verdict, Mapping) and verdict.get("cold") is True


def record_of(fields: dict[str, Any], number: int, where: str) -> Record:
    """The fields of a line as a Record. Raises ConfigError, which says `where`, for fields that cannot be used."""
    missing = [name for name in REQUIRED if fields.get(name) is None]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; a record needs {', '.join(REQUIRED)}")
    check_fields(fields, where)
    try:
        caller_of(fields)
        unclear_of(fields)
        batch, seconds = batch_of(fields), _seconds(fields)
        limits = recorded_limits(fields).holding(batch.longest)
    except Fp8PlanError as error:
        raise ConfigError(f"{where}: {error}") from None
    return Record(number, batch, limits, seconds, _group(fields, batch, limits), fields)


def check_fields(fields: dict[str, Any], where: str) -> None:
    """Raise ConfigError naming the field of a rollout record that has the wrong type, or an engine other than vLLM."""
    engine = checked(fields, RolloutRecord, where).engine or ENGINE
    if engine != ENGINE:
        raise ConfigError(f"{where}: engine is {engine!r}; allowed: {ENGINE}, the one that is modelled")


def caller_of(fields: Mapping[str, Any]) -> str:
    """The program that called the engine of a record. Raises ConfigError for one that fp8plan does not know."""
    return check_inside(fields.get("inside") or OWN)


def recorded_limits(fields: Mapping[str, Any]) -> EngineLimits:
    """The limits of the engine of a record. Raises ConfigError if the KV cache has fewer than two blocks."""
    card = find_gpu(fields["gpu"])
    recorded: dict[str, Any] = {limit: fields.get(name) for name, limit in RECORDED.items()}
    recorded["max_cudagraph_capture_size"] = fields.get("max_cudagraph_capture_size")
    limits, imposed = EngineLimits.for_gpu(card, **recorded), fields.get("kv_cache_tokens")
    if imposed is None:
        return limits
    if imposed < 2 * limits.block_size:
        raise ConfigError(f"kv_cache_tokens is {imposed}; allowed: at least two blocks of {limits.block_size}, or null")
    # Less vLLM's null block. The blocks of a model with several groups of layers may be larger than block_size.
    return replace(limits, num_gpu_blocks=(fields.get("num_gpu_blocks") or imposed // limits.block_size) - 1)


def _seconds(fields: dict[str, Any]) -> float:
    seconds = fields["seconds"]
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"seconds is {seconds!r}; allowed: a finite number above 0")
    return float(seconds)


def _group(fields: dict[str, Any], batch: Batch, limits: EngineLimits) -> str:
    gpu = find_gpu(fields["gpu"]).name
    same = [fields["model"], gpu, fields["engine_version"], *(column.tolist() for column in batch[:3])]
    if (turns := batch.turns) is not None:  # measured waits differ from run to run
        same += [turns.first.tolist(), turns.generated.tolist(), turns.tool.tolist(), turns.concurrent]
    same += [getattr(limits, limit) for name, limit in RECORDED.items() if name == limit]
    same += [limits.tensor_parallel_size, limits.data_parallel_size]
    same += ["expert_parallel"] if limits.enable_expert_parallel else []
    same += ["routed_experts"] if limits.enable_return_routed_experts else []
    same += [] if (imposed := limits.max_cudagraph_capture_size) is None else [imposed]
    same += [] if (caller := caller_of(fields)) == OWN else [caller]
    name = f"{fields['model']} on {gpu}, {len(batch.responses)} responses"
    return f"{name} [{sha256(json.dumps(same).encode()).hexdigest()[:8]}]"


def host_of(records: Sequence[Record], gpu: str) -> float | None:
    """The median `host_loop_s` of records of a GPU; None if none has it."""
    fields = (record.fields for record in records if record.setup.gpu.name == gpu)
    loops = [loop_s for each in fields if (loop_s := each.get("host_loop_s")) is not None]
    return float(np.median(loops)) if loops else None
