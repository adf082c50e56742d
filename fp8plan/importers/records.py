"""Rollout records from a trainer's log: lengths from its dumps, seconds from its figures, the engine from its user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.importers import skyrl, trl, verl
from fp8plan.importers.figures import Figures, figures
from fp8plan.importers.logged import Counted, Logged, Request, Source, counted
from fp8plan.importers.tokens import UNUSED_TOOLS, Counter, load_tokenizer, load_tools
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import precision
from fp8plan.schemas import REQUIRED, VERSIONS
from fp8plan.version import __version__

SOURCES: Final[dict[str, Source]] = {"verl": verl.SOURCE, "trl": trl.SOURCE, "skyrl": skyrl.SOURCE}
NEAR: Final = 0.02  # how far the mean of counted tokens may be from the trainer's before it is said

Progress = Callable[[int, int], object]  # called with the bytes that are read, and with all there are to read


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

    trainer:   verl, trl or skyrl
    folder:    where it wrote them
    tokenizer: hub id or folder of the run's tokenizer, for logs that hold text
    log:       the trainer's figures (see fp8plan.importers.figures), for the seconds
    last:      take only so many rollouts, the last ones; no other file is read
    engine:    fields of a rollout record that say what ran: model, gpu, engine_version, precision, ...
    progress:  called as the files are read, with the bytes that are done and all of them
    tools:     JSON file with the definitions of the run's tools, for logs of conversations

    A newest file without a whole request is left out, with a note: its writer was killed, or is at work. So is a last
    line that breaks off.

    Raises ConfigError for what cannot be read, and for a log of text without a tokenizer.
    """
    stream = RolloutStream(trainer, folder, tokenizer, log, last, engine or {}, progress, tools)
    records = list(stream)
    return Imported(records, stream.notes)


class RolloutStream:
    """The records of `import_rollouts`, one at a time: all of a long run's may be more than the memory holds.

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
        said = _checked(engine)
        if not Path(folder).is_dir():
            raise ConfigError(f"there is no folder {folder}; give the one that {trainer} wrote its rollouts to")
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
                    self._begin(logged)  # a file that is none of the trainer's is said first
                raise ConfigError(
                    "the log holds text, not tokens; give --tokenizer, the hub id or folder of the run's model"
                )
            self._counter = Counter(load_tokenizer(tokenizer), self._source.special_tokens, self._tools, self._note)
        version = {"schema_version": VERSIONS["record"], "fp8plan_version": __version__}
        self._facts = version | {"imported_from": f"{trainer} {folder}"} | said

    def __iter__(self) -> Iterator[dict[str, Any]]:
        sizes = [logged.path.stat().st_size for logged in self._chosen]
        means, missing, timed = _Means(self._known, self._source), dict[str, None](), 0
        for number, logged in enumerate(self._chosen):
            done = sum(sizes[:number])
            rollout = self._counted(logged, done, sizes[number], sum(sizes))
            means.add(rollout)
            record = self._record(rollout)
            missing |= dict.fromkeys(name for name in REQUIRED if name not in record)
            timed += "seconds" in record
            yield record
            self._progress(done + sizes[number], sum(sizes))
        if missing:
            absent = [name for name in REQUIRED if name in missing]
            means.notes.append(_absent(absent, self._trainer, self._source, self._log, timed, len(sizes)))
        if self._tools and not (self._counter and self._counter.rendered):
            self._note(UNUSED_TOOLS)
        self.notes += means.notes

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _choose(self, every: Sequence[Logged], last: int | None) -> list[Logged]:
        """Return the rollouts to read, all or the last ones; notes say which are left out."""
        figure = self._source.overwritten
        lost = {step for step, values in self._known.items() if figure in values}
        kept = [x for x in every if x.step not in lost]
        if not kept:
            raise ConfigError("every logged rollout is an evaluation's; evaluate less often than every logging step")
        if left := sorted({x.step for x in every} & lost):
            self._note(f"left out, as an evaluation wrote over them: steps {', '.join(map(str, left))}")
        try:
            self._begin(kept[-1])
        except ConfigError as error:
            if len(kept) == 1:
                raise
            self._note(f"step {kept.pop().step}, the last one, is left out: {error}")
        new = (x for x in reversed(kept) if not self._again(x))
        return list(islice(new, last))[::-1]

    def _begin(self, logged: Logged) -> None:
        """Read the first request of a file. Raises ConfigError if there is none."""
        if next(iter(self._source.requests(logged.path, str)), None) is None:
            raise ConfigError(f"{logged.path} holds no whole response; delete it")

    def _again(self, logged: Logged) -> bool:
        """Tell whether a rollout is the one before, which is trained on again. One that cannot be read is not."""
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
            self._known.pop(logged.step, None)  # figures of all of its responses
        return rollout

    def _watched(self, requests: Iterator[Request], done: int, size: int, total: int) -> Iterator[Request]:
        """The requests of a file of `size` bytes; their text says about how far it is read."""
        read = 0
        for request in requests:
            yield request
            read += sum(len(text) for text in request if isinstance(text, str))
            self._progress(done + min(read, size), total)

    def _record(self, rollout: Counted) -> dict[str, Any]:
        return (
            self._facts
            | {"step": rollout.step, "prompt_ids": rollout.prompt_ids}
            | ({"first_rollout": True} if rollout.step == self._first else {})
            | {"prompt_lengths": rollout.prompt_lengths, "response_lengths": rollout.response_lengths}
            | _seconds(self._known.get(rollout.step, {}), self._source)
        )


def _checked(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's fields; a slip is found now and not when the records are used."""
    fields = dict(engine)
    if "gpu" in fields:
        fields["gpu"] = find_gpu(fields["gpu"]).name
    if "precision" in fields:
        precision(fields["precision"])
    if "model" in fields:
        ModelShape.from_hf(fields["model"])
    return fields


def _seconds(known: Mapping[str, float], source: Source) -> dict[str, float]:
    seconds = known.get(source.seconds or "")
    return {"seconds": seconds} if seconds is not None and is_number(seconds) else {}


class _Means:
    """Mean lengths as they were counted, against the trainer's own figures.

    notes: on the rollout whose mean is farthest from it, if that is far
    """

    def __init__(self, known: Figures, source: Source) -> None:
        self._known, self._name = known, source.mean_response
        self._worst, self.notes = NEAR, list[str]()

    def add(self, rollout: Counted) -> None:
        logged = self._known.get(rollout.step, {}).get(self._name or "")
        off = rollout.mean_response / logged - 1 if logged and is_number(logged) else 0.0
        if abs(off) > self._worst:
            means = f"step {rollout.step}: {rollout.mean_response:,.1f} tokens a response by the text"
            hint = "a large gap means another tokenizer, or figures that average over steps"
            note = f"{means}, {logged:,.1f} in the log ({off:+.1%}); the text has no special tokens; {hint}"
            self._worst, self.notes = abs(off), [note]


def _absent(
    missing: Sequence[str], trainer: str, source: Source, log: str | Path | None, timed: int, records: int
) -> str:
    """Name what `validate` needs and the records do not have, and say how to give it."""
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
