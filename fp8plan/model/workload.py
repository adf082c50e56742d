"""What is rolled out: how many prompts and samples, and how long they are."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.model.arrays import IntArray

LENGTHS_SYNTAX = "fixed:TOKENS, lognormal:mean=TOKENS,sigma=S,max=TOKENS, or a .jsonl or .parquet file of lengths"


# Far above any context or rollout, and low enough for int64 sums over a batch.
MOST_TOKENS = 10**9
MOST_REQUESTS = 10**7


class Batch(NamedTuple):
    """Requests in order of arrival: int64 arrays of shape (requests,)."""

    prompts: IntArray  # prompt tokens, at least 1
    responses: IntArray  # response tokens, at least 1
    prompt_ids: IntArray  # equal where two requests have the same prompt; 0 .. prompts-1

    @property
    def longest(self) -> int:
        """Prompt + response tokens of the longest request."""
        return int((self.prompts + self.responses).max())

    def split(self, replicas: int) -> list[Batch]:
        """Consecutive, nearly equal parts, as RL trainers split a batch between data-parallel replicas (which ask for a
        number that divides; where it does not, a prompt's samples may be parted here). Replicas without a request are
        left out."""
        bounds = np.linspace(0, len(self.prompts), min(replicas, len(self.prompts)) + 1).astype(int)
        return [_renumber(Batch(*(column[a:b] for column in self))) for a, b in itertools.pairwise(bounds)]


def _renumber(batch: Batch) -> Batch:
    return batch._replace(prompt_ids=np.unique(batch.prompt_ids, return_inverse=True)[1].astype(np.int64))


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every length is `tokens`."""

    tokens: int

    def __post_init__(self) -> None:
        _check_length("fixed length", self.tokens, whole=True)

    @property
    def longest(self) -> int:
        return self.tokens

    def describe(self) -> dict[str, Any]:
        return {"kind": "fixed", "tokens": self.tokens}

    def draw(self, count: int, rng: np.random.Generator) -> IntArray:
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lognormal lengths, rounded and clipped to 1 .. max, as a rollout clips at its longest response.

    mean:  tokens, of the distribution before clipping
    sigma: standard deviation of the natural log of the length
    max:   tokens
    """

    mean: float
    sigma: float
    max: int

    def __post_init__(self) -> None:
        _check_length("lognormal mean", self.mean)
        _check_length("lognormal max", self.max, whole=True)
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise ConfigError(f"lognormal sigma is {self.sigma!r}; allowed: a finite number of at least 0")

    @property
    def longest(self) -> int:
        return self.max

    def describe(self) -> dict[str, Any]:
        return {"kind": "lognormal", "mean": self.mean, "sigma": self.sigma, "max": self.max}

    def draw(self, count: int, rng: np.random.Generator) -> IntArray:
        median = math.log(self.mean) - self.sigma**2 / 2  # mean of a lognormal = exp(mu + sigma^2 / 2)
        return np.clip(np.rint(rng.lognormal(median, self.sigma, count)), 1, self.max).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Trace:
    """Lengths that were seen: used in order if there are as many as asked for, else drawn with replacement."""

    lengths: tuple[int, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ConfigError(f"the trace {self.source} has no lengths; give at least one row")
        for row, length in enumerate(self.lengths):
            _check_length(f"length in row {row + 1} of {self.source}", length, whole=True)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def describe(self) -> dict[str, Any]:
        return {"kind": "trace", "source": self.source, "rows": len(self.lengths)}

    def draw(self, count: int, rng: np.random.Generator) -> IntArray:
        seen = np.array(self.lengths, dtype=np.int64)
        return seen if count == len(seen) else rng.choice(seen, count)


Lengths = Fixed | LogNormal | Trace


@dataclass(frozen=True, slots=True)
class Workload:
    """One rollout of an RL step: `prompts` prompts, `samples_per_prompt` responses to each."""

    prompts: int
    samples_per_prompt: int
    prompt_lengths: Lengths
    response_lengths: Lengths
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "samples_per_prompt"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: a whole number of at least 1")
        if self.prompts * self.samples_per_prompt > MOST_REQUESTS:
            asked = f"{self.prompts} x {self.samples_per_prompt}"
            raise ConfigError(f"prompts x samples_per_prompt is {asked}; allowed: at most {MOST_REQUESTS:,} responses")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed!r}; allowed: a whole number of at least 0")

    def batch(self) -> Batch:
        """The requests, prompt by prompt, samples of a prompt next to each other. The seed decides the lengths.

        Prompt and response lengths are independent, but for a trace with one row per response: its rows are taken in
        order, and the first of each prompt gives the prompt's length.
        """
        rng = np.random.default_rng(self.seed)
        prompt_ids = np.repeat(np.arange(self.prompts, dtype=np.int64), self.samples_per_prompt)
        if isinstance(self.prompt_lengths, Trace) and len(self.prompt_lengths.lengths) == len(prompt_ids):
            prompts = self.prompt_lengths.draw(len(prompt_ids), rng)[:: self.samples_per_prompt]
        else:
            prompts = self.prompt_lengths.draw(self.prompts, rng)
        return Batch(prompts[prompt_ids], self.response_lengths.draw(len(prompt_ids), rng), prompt_ids)


def parse_lengths(text: str, column: str) -> Lengths:
    """Read lengths as the command line spells them: LENGTHS_SYNTAX.

    column: which column of a trace file holds them, "prompt_length" or "response_length"

    Raises ConfigError for anything else, and for a file that is missing, empty or holds bad lengths.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "fixed":
            return Fixed(int(rest))
        if kind == "lognormal":
            fields = {name: value for name, _, value in (part.partition("=") for part in rest.split(","))}
            return LogNormal(float(fields.pop("mean")), float(fields.pop("sigma")), _last(fields, "max"))
    except (ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot read the lengths {text!r}; allowed: {LENGTHS_SYNTAX}") from None
    path = Path(text)
    if path.suffix in (".jsonl", ".parquet"):
        return Trace(tuple(_read_column(path, column)), str(path))
    raise ConfigError(f"cannot read the lengths {text!r}; allowed: {LENGTHS_SYNTAX}")


def _last(fields: dict[str, str], name: str) -> int:
    value = int(fields.pop(name))
    if fields:
        raise ValueError(f"unknown: {', '.join(fields)}")
    return value


def _read_column(path: Path, column: str) -> list[int]:
    """One length per row: a bare number, or the row's `column`."""
    if not path.exists():
        raise ConfigError(f"there is no trace file {path}")
    if path.suffix == ".parquet":
        import pandas as pd

        try:
            table = pd.read_parquet(path)
        except Exception as error:  # pyarrow raises a type of its own per kind of damage
            raise ConfigError(f"cannot read the trace {path} as parquet: {error}") from None
        if column not in table.columns:
            raise ConfigError(f"the trace {path} has no column {column!r}; it has {', '.join(map(str, table.columns))}")
        return table[column].tolist()  # type: ignore[no-any-return]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    values = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            values.append(row[column] if isinstance(row, dict) else row)
        except (json.JSONDecodeError, KeyError) as error:
            wanted = f'a number, or an object with "{column}"'
            raise ConfigError(f"line {number} of the trace {path} is not {wanted}: {error}") from None
    return values


def _check_length(what: str, tokens: Any, whole: bool = False) -> None:
    number = isinstance(tokens, (int, float, np.integer, np.floating)) and not isinstance(tokens, bool)
    if not number or not 1 <= tokens <= MOST_TOKENS or (whole and tokens != int(tokens)):
        kind = "whole" if whole else "finite"
        raise ConfigError(f"{what} is {tokens!r}; allowed: a {kind} number of tokens, 1 to {MOST_TOKENS:,}")
