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
from fp8plan.importers import jsonl, notes, skyrl, trl, verl
from fp8plan.importers.counter import Counter, load_tokenizer, load_tools
from fp8plan.importers.figures import figures
from fp8plan.importers.logged import Counted, Logged, Request, Tally, counted
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import find_precision
from fp8plan.model.validate.records import caller_of
from fp8plan.schemas import REQUIRED, VERSIONS
from fp8plan.version import __version__

SOURCES: Final = {"verl": verl.SOURCE, "trl": trl.SOURCE, "skyrl": skyrl.SOURCE, "jsonl": jsonl.SOURCE}
NEAR: Final = 0.02  # largest relative gap from the trainer's mean tokens that needs no note
Progress = Callable[[int, int], object]  # called with the bytes read, and with their total


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
        tally, widest, missing, timed = Tally(), (NEAR, ""), set[str](), 0  # widest: a gap, and the note on it
        for number, logged in enumerate(self._chosen):
            done = sum(sizes[:number])
            rollout = self._counted(logged, done, sizes[number], sum(sizes))
            own = rollout.tally
            tally, widest = tally.plus(own), max(widest, self._gap(rollout.step, own))
            record = self._record(rollout)
            missing |= set(REQUIRED) - set(record)
            timed += "seconds" in record
            yield record
            self._progress(done + sizes[number], sum(sizes))
        for note in notes.of_turns(tally):
            self._note(note)
        if self._tools and not (self._counter and self._counter.rendered):
            self._note(notes.UNUSED_TOOLS)
        if widest[1]:
            self._note(widest[1])
        if missing:
            fields = [name for name in REQUIRED if name in missing]
            self._note(notes.absent(fields, self._trainer, self._source, self._log, timed, len(sizes)))

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
        if steps := sorted({logged.step for logged in every} & lost):
            self._note(notes.OVERWRITTEN.format(", ".join(map(str, steps))))
        try:
            self._begin(kept[-1])
        except ConfigError as error:
            if len(kept) == 1:
                raise
            self._note(notes.LAST_LEFT_OUT.format(kept.pop().step, error))
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
            self._note(notes.TORN_ROLLOUT.format(text, logged.step))
            self._known.pop(logged.step, None)  # its figures are of all responses
        return rollout

    def _watched(self, requests: Iterator[Request], done: int, size: int, total: int) -> Iterator[Request]:
        """The requests of a file of `size` bytes. The length of their text is the progress."""
        read = 0
        for request in requests:
            yield request
            read += sum(len(text) for text in request if isinstance(text, str))
            self._progress(done + min(read, size), total)

    def _gap(self, step: int, tally: Tally) -> tuple[float, str]:
        """The relative gap of the mean response from the trainer's own figure, and a note on it."""
        logged = self._known.get(step, {}).get(self._source.mean_response or "")
        if not logged or not is_number(logged):
            return 0.0, ""
        tokens = tally.generated + (tally.tools if self._source.mean_with_tools else 0)
        mean = tokens / tally.responses
        return abs(mean / logged - 1), notes.of_gap(step, mean, logged)

    def _record(self, rollout: Counted) -> dict[str, Any]:
        record = self._facts | {"step": rollout.step, "prompt_ids": rollout.prompt_ids}
        if rollout.step == self._first:
            record["first_rollout"] = True
        record |= {"prompt_lengths": rollout.prompt_lengths, "response_lengths": rollout.response_lengths}
        if any(len(turns) > 1 for turns in rollout.turns):
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
