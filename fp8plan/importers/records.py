"""Rollout records from a trainer's log: lengths from its dumps, seconds from its figures, the engine from its user.

The run's own tokenizer counts the tokens of logged text. A note compares the mean with the trainer's own figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.importers import jsonl, skyrl, trl, verl
from fp8plan.importers.counter import Counter, load_tokenizer, load_tools
from fp8plan.importers.figures import Figures, figures
from fp8plan.importers.logged import (
    Counted,
    Logged,
    Request,
    Source,
    counted,
)
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import find_precision
from fp8plan.model.validate.records import caller_of
from fp8plan.model.workload_turns import WAITS
from fp8plan.schemas import REQUIRED, VERSIONS
from fp8plan.version import __version__

SOURCES: Final = {"verl": verl.SOURCE, "trl": trl.SOURCE, "skyrl": skyrl.SOURCE, "jsonl": jsonl.SOURCE}
NEAR: Final = 0.02  # largest relative gap from the trainer's mean tokens that needs no note
Progress = Callable[[int, int], object]  # called with the bytes read, and with their total
UNUSED_TOOLS: Final = "--tools was not used: the log holds no conversations, and prompts have their tools in them"


@dataclass(frozen=True, slots=True)
class Imported:
    """Rollout records by step, as `fp8plan plan --workload` and `fp8plan validate` read them, and notes on them."""

    records: list[dict[str, Any]]
    notes: list[str]


def import_rollouts(
    trainer: str,
    folder: str | Path,
    *,
    tokenizer: str | None = None,
    log: str | Path | None = None,
    last: int | None = None,
    engine: Mapping[str, Any] | None = None,
    progress: Progress = lambda done, total: None,
    tools: str | Path | None = None,
) -> Imported:
    """Turn the rollouts that a trainer logged into rollout records.

    trainer:   verl, trl, skyrl or jsonl
    folder:    the folder of the trainer's log of rollouts
    tokenizer: hub id or folder of the run's tokenizer, for logs that hold text
    log:       the trainer's figures (see fp8plan.importers.figures), for the seconds
    last:      number of the last rollouts to take; no other file is read
    engine:    fields of a rollout record on the engine: model, gpu, engine_version, precision, ...
    progress:  called as the files are read, with the bytes read and their total
    tools:     JSON file with the definitions of the run's tools, for logs of conversations

    Notes name the newest file if it has no whole request, and a last line that breaks off. Both are left out: their
    writer was killed, or is at work.

    Raises ConfigError for files that cannot be read, and for a log of text without a tokenizer.
    """
    stream = RolloutStream(trainer, folder, tokenizer, log, last, engine or {}, progress, tools)
    records = list(stream)
    return Imported(records, stream.notes)


class RolloutStream:
    """The records of `import_rollouts`, one at a time: those of a long run may not fit in memory.

    notes: remarks, complete after the last record
    """

    def __init__(
        self,
        trainer: str,
        folder: str | Path,
        tokenizer: str | None,
        log: str | Path | None,
        last: int | None,
        engine: Mapping[str, Any],
        progress: Progress,
        tools: str | Path | None = None,
    ) -> None:
        if trainer not in SOURCES:
            raise ConfigError(f"unknown trainer {trainer!r}; allowed: {', '.join(SOURCES)}")
        self._trainer, self._source, self._log, self._progress = trainer, SOURCES[trainer], log, progress
        facts = _checked(engine)
        if not Path(folder).is_dir():
            raise ConfigError(f"there is no folder {folder}; give the one of the rollouts' files")
        self.notes = list[str]()
        self._known = figures(Path(log), self._note) if log is not None else {}
        every = self._source.rollouts(Path(folder))
        self._first = every[0].step
        self._chosen = self._choose(every, last)
        self._tools = None if tools is None else load_tools(Path(tools))
        self._counter: Counter | None = None
        if self._source.of_text:
            if tokenizer is None:
                for logged in self._chosen[:1]:
                    self._begin(logged)  # raises the error for a file of another kind first
                raise ConfigError(
                    "the log holds text, not tokens; give --tokenizer, the hub id or folder of the run's model"
                )
            self._counter = Counter(load_tokenizer(tokenizer), self._source.special_tokens, self._tools, self._note)
        version = {"schema_version": VERSIONS["record"], "fp8plan_version": __version__}
        self._facts = version | {"imported_from": f"{trainer} {folder}", "inside": self._source.inside} | facts

    def __iter__(self) -> Iterator[dict[str, Any]]:
        sizes = [logged.path.stat().st_size for logged in self._chosen]
        totals, missing, timed = _Totals(self._known, self._source), dict[str, None](), 0
        for number, logged in enumerate(self._chosen):
            done = sum(sizes[:number])
            rollout = self._counted(logged, done, sizes[number], sum(sizes))
            totals.add(rollout)
            record = self._record(rollout)
            missing |= dict.fromkeys(name for name in REQUIRED if name not in record)
            timed += "seconds" in record
            yield record
            self._progress(done + sizes[number], sum(sizes))
        for note in totals.of_tools():
            self._note(note)
        if self._tools and not (self._counter and self._counter.rendered):
            self._note(UNUSED_TOOLS)
        if totals.gap_note:
            self._note(totals.gap_note)
        if missing:
            absent = [name for name in REQUIRED if name in missing]
            self._note(_absent(absent, self._trainer, self._source, self._log, timed, len(sizes)))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _choose(self, every: Sequence[Logged], last: int | None) -> list[Logged]:
        """The rollouts to read, all or the last ones; notes name the others."""
        figure = self._source.overwritten
        lost = {step for step, values in self._known.items() if figure in values}
        kept = [logged for logged in every if logged.step not in lost]
        if not kept:
            raise ConfigError("every logged rollout is an evaluation's; evaluate less often than every logging step")
        if steps := ", ".join(map(str, sorted({logged.step for logged in every} & lost))):
            self._note(f"left out, as an evaluation wrote over them: steps {steps}")
        try:
            self._begin(kept[-1])
        except ConfigError as error:
            if len(kept) == 1:
                raise
            self._note(f"step {kept.pop().step}, the last one, is left out: {error}")
        new = (logged for logged in reversed(kept) if not self._again(logged))
        return list(islice(new, last))[::-1]

    def _begin(self, logged: Logged) -> None:
        """Read the first request of a file. Raises ConfigError if there is none."""
        if next(iter(self._source.requests(logged.path, str)), None) is None:
            raise ConfigError(f"{logged.path} holds no whole response; delete it")

    def _again(self, logged: Logged) -> bool:
        """True if a rollout repeats the one before, which is trained on again. An unreadable one counts as new."""
        if self._source.repeats is None or logged.before is None:
            return False
        try:
            return self._source.repeats(logged.path, logged.before)
        except ConfigError:
            return False

    def _counted(self, logged: Logged, done: int, size: int, total: int) -> Counted:
        self._begin(logged)
        torn = list[str]()
        requests: Any = self._source.requests(logged.path, torn.append)
        if self._counter is not None:
            requests = self._counter.measured(self._watched(requests, done, size, total))
        rollout = counted(logged.step, requests)
        for text in torn:
            self._note(f"{text}; so step {logged.step} lacks a response at least, and its seconds are left out")
            self._known.pop(logged.step, None)  # its figures are of all responses
        return rollout

    def _watched(self, requests: Iterator[Request], done: int, size: int, total: int) -> Iterator[Request]:
        """The requests of a file of `size` bytes. The length of their text is the progress."""
        read = 0
        for request in requests:
            yield request
            read += sum(len(text) for text in request if isinstance(text, str))
            self._progress(done + min(read, size), total)

    def _record(self, rollout: Counted) -> dict[str, Any]:
        record = self._facts | {"step": rollout.step, "prompt_ids": rollout.prompt_ids}
        if rollout.step == self._first:
            record["first_rollout"] = True
        record |= {"prompt_lengths": rollout.prompt_lengths, "response_lengths": rollout.response_lengths}
        if rollout.several:
            record["turns"] = [[list(turn) for turn in turns] for turns in rollout.turns]
        if rollout.unclear:
            record["unclear_responses"] = rollout.unclear
        seconds = self._known.get(rollout.step, {}).get(self._source.seconds or "")
        if is_number(seconds):
            record["seconds"] = seconds
        return record


def _checked(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's fields, checked before the records are made."""
    fields = dict(engine)
    if "gpu" in fields:
        fields["gpu"] = find_gpu(fields["gpu"]).name
    if "precision" in fields:
        find_precision(fields["precision"])
    if "model" in fields:
        ModelShape.from_hf(fields["model"])
    caller_of(fields)
    return fields


@dataclass(slots=True)
class _Totals:
    """Numbers of responses and tokens in all rollouts, and a note on the mean length that is furthest off the log's.

    known: the trainer's own figures
    """

    known: Figures
    source: Source
    responses: int = 0
    several: int = 0
    unclear: int = 0
    generated: int = 0
    tools: int = 0
    unknown_waits: bool = False
    gap: float = NEAR
    gap_note: str | None = None

    def add(self, rollout: Counted) -> None:
        self.responses += len(rollout.turns)
        self.several += rollout.several
        self.unclear += rollout.unclear
        self.generated += sum(rollout.response_lengths)
        self.tools += rollout.tool_tokens
        self.unknown_waits |= rollout.unknown_waits
        logged = self.known.get(rollout.step, {}).get(self.source.mean_response or "")
        if not logged or not is_number(logged):
            return
        mean = rollout.mean_response(self.source.mean_with_tools)
        off = mean / logged - 1
        if abs(off) > self.gap:
            self.gap = abs(off)
            self.gap_note = (
                f"step {rollout.step}: {mean:,.1f} tokens a response by the text, {logged:,.1f} in the log "
                f"({off:+.1%}); the text has no special tokens; a large gap means another tokenizer, or figures that "
                "average over steps"
            )

    def of_tools(self) -> Iterator[str]:
        """Remarks on turns and tools."""
        if self.several:
            share = self.tools / (self.generated + self.tools)
            yield (
                f"{self.several:,} of {self.responses:,} responses have several turns. {share:.1%} of the tokens of "
                "all responses are tool output or a user's, which no engine generated: they are in turns, not in "
                "response_lengths. The seconds hold the tools' own"
            )
        if self.unknown_waits:
            yield f"the log does not say how long the tools took: type plan --workload FILE --tool-s {WAITS}"
        if self.unclear:
            yield (
                f"{self.unclear:,} of {self.responses:,} responses ({self.unclear / self.responses:.1%}) may hold tool "
                "output: they show a marker of a tool or of a second turn, or their mask is missing. The log cannot "
                "tell its share, so all of their tokens count as generated"
            )


def _absent(
    missing: Sequence[str], trainer: str, source: Source, log: str | Path | None, timed: int, records: int
) -> str:
    """A note on the fields that `validate` needs and the records lack, and how to give them."""
    options = ", ".join(f"--{name.replace('_', '-')}" for name in missing if name != "seconds")
    ways = [f"give {options}"] if options else []
    if "seconds" in missing:
        if source.seconds is None:
            ways.append(f"{trainer} logs no seconds of generation: write them into the lines")
        elif log is None:
            ways.append(f"give --log, where {trainer} logs {source.seconds}")
        else:
            ways.append(f"{log} has {source.seconds} of {timed} of {records} rollouts")
    return f"not known: {', '.join(missing)}; `plan --workload` does without, `validate` does not: {'; '.join(ways)}"
