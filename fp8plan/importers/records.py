"""Rollout records from a trainer's log: lengths from its dumps, seconds from its figures, the engine from its user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.importers import skyrl, trl, verl
from fp8plan.importers.figures import Figures, figures
from fp8plan.importers.logged import Counted, Source, Texts
from fp8plan.importers.tokens import count, load_tokenizer
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import precision
from fp8plan.schemas import REQUIRED, VERSIONS
from fp8plan.version import __version__

SOURCES: Final[dict[str, Source]] = {"verl": verl.SOURCE, "trl": trl.SOURCE, "skyrl": skyrl.SOURCE}
NEAR: Final = 0.02  # how far the mean of counted tokens may be from the trainer's before it is said

Progress = Callable[[Iterable[Any]], Iterable[Any]]


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
    progress: Progress = iter,
) -> Imported:
    """Turn the rollouts that a trainer logged into rollout records.

    trainer:   verl, trl or skyrl
    folder:    where it wrote them
    tokenizer: hub id or folder of the run's tokenizer, for logs that hold text
    log:       the trainer's figures (see fp8plan.importers.figures), for the seconds
    last:      take only so many rollouts, the last ones
    engine:    fields of a rollout record that say what ran: model, gpu, engine_version, precision, ...

    Raises ConfigError for what cannot be read, and for a log of text without a tokenizer.
    """
    if trainer not in SOURCES:
        raise ConfigError(f"unknown trainer {trainer!r}; allowed: {', '.join(SOURCES)}")
    source, said = SOURCES[trainer], _checked(engine or {})
    if not Path(folder).is_dir():
        raise ConfigError(f"there is no folder {folder}; give the one that {trainer} wrote its rollouts to")
    known = figures(Path(log)) if log is not None else {}
    found, notes = _of_training(source.rollouts(Path(folder)), known, source)
    rollouts = _counted(found[-last:] if last else found, tokenizer, progress)
    notes += _compared(rollouts, known, source)
    records = [
        {"schema_version": VERSIONS["record"], "fp8plan_version": __version__, "imported_from": f"{trainer} {folder}"}
        | said
        | {"step": rollout.step, "prompt_ids": rollout.prompt_ids}
        | {"prompt_lengths": rollout.prompt_lengths, "response_lengths": rollout.response_lengths}
        | _seconds(known.get(rollout.step, {}), source)
        for rollout in rollouts
    ]
    return Imported(records, [*notes, *_left_out(records, trainer, source, log)])


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


def _of_training(
    rollouts: Sequence[Texts | Counted], known: Figures, source: Source
) -> tuple[list[Texts | Counted], list[str]]:
    """The rollouts that are the training's own, and a note on the others."""
    lost = {step for step, values in known.items() if source.overwritten is not None and source.overwritten in values}
    kept = [one for one in rollouts if one.step not in lost]
    if not kept:
        raise ConfigError("every logged rollout is an evaluation's; evaluate less often than every logging step")
    left = sorted({one.step for one in rollouts} & lost)
    return kept, [f"left out, as an evaluation wrote over them: steps {', '.join(map(str, left))}"] if left else []


def _counted(rollouts: list[Texts | Counted], name: str | None, progress: Progress) -> list[Counted]:
    texts = any(isinstance(one, Texts) for one in rollouts)
    if texts and name is None:
        raise ConfigError("the log holds text, not tokens; give --tokenizer, the hub id or folder of the run's model")
    tokenizer = load_tokenizer(name) if texts and name is not None else None
    return [count(one, tokenizer) if isinstance(one, Texts) else one for one in progress(rollouts)]


def _seconds(known: Mapping[str, float], source: Source) -> dict[str, float]:
    return {"seconds": known[source.seconds]} if source.seconds is not None and source.seconds in known else {}


def _compared(rollouts: list[Counted], known: Figures, source: Source) -> list[str]:
    """A note on the rollout whose mean length is farthest from the trainer's own figure, if that is far."""
    name = source.mean_response
    pairs = [(one, known[one.step][name]) for one in rollouts if name is not None and name in known.get(one.step, {})]
    if not pairs:
        return []
    worst, logged = max(pairs, key=lambda pair: abs(pair[0].mean_response / pair[1] - 1) if pair[1] else 0.0)
    off = worst.mean_response / logged - 1 if logged else 0.0
    told = f"step {worst.step}: {worst.mean_response:,.1f} tokens a response by the text, {logged:,.1f} in the log"
    hint = "the text has no special tokens; a large gap means another tokenizer, or figures that average over steps"
    return [f"{told} ({off:+.1%}); {hint}"] if abs(off) > NEAR else []


def _left_out(records: list[dict[str, Any]], trainer: str, source: Source, log: str | Path | None) -> list[str]:
    """Name what `validate` needs and the records do not have, and say how to give it."""
    missing = [name for name in REQUIRED if any(name not in record for record in records)]
    if not missing:
        return []
    options = ", ".join(f"--{name.replace('_', '-')}" for name in missing if name != "seconds")
    ways = [f"give {options}"] if options else []
    if "seconds" in missing:
        timed = sum("seconds" in record for record in records)
        if source.seconds is None:
            ways.append(f"{trainer} logs no seconds of generation: write them into the lines")
        elif log is None:
            ways.append(f"give --log, where {trainer} logs {source.seconds}")
        else:
            ways.append(f"{log} has {source.seconds} of {timed} of {len(records)} rollouts")
    return [f"not known: {', '.join(missing)}; `plan --workload` does without, `validate` does not: {'; '.join(ways)}"]
