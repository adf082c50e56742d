"""Numbers of a workload as a user describes them: lengths, turns and seconds, all alike, lognormal, or as observed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8plan.checks import is_number, nearest, number_hint
from fp8plan.errors import ConfigError
from fp8plan.jsonl import lines
from fp8plan.packages import PARQUET, package

PROMPT, RESPONSE = "prompt_length", "response_length"  # columns of a trace
LIKE = 0.85  # similarity from which a column's name counts as a typo of these
DEFAULT_PROMPTS = "1024"
MOST_SIGMA = 10.0  # rollouts have about 1
# Far above any context or rollout, and low enough for int64 sums over a batch.
MOST_TOKENS = 10**9
MOST_TURNS = 10_000
MOST_SECONDS = 86_400  # of a tool: a day


class Quantity(NamedTuple):
    """The quantity that a distribution is of, with the bounds of its numbers.

    unit: of a number, which is a key of `describe`, too
    """

    unit: str
    least: int
    most: int
    whole: bool = True

    @property
    def dtype(self) -> type[np.generic]:
        return np.int64 if self.whole else np.float64

    @property
    def syntax(self) -> str:
        """The ways to type a distribution."""
        number = self.unit.upper()
        spread = f"lognormal:mean={number},sigma=S,max={number}"
        return f"{number} or fixed:{number}, {spread}, or a .jsonl or .parquet file of them"

    def number(self, text: str) -> int | float:
        """A typed number. Raises ValueError for other text."""
        return int(text) if self.whole else float(text)

    def check(self, what: str, value: float) -> None:
        """Raise ConfigError for a number that is not in the bounds, or not whole if it has to be."""
        if not self.least <= value <= self.most or (self.whole and value != int(value)):
            kind = "whole" if self.whole else "finite"
            raise ConfigError(
                f"{what} is {value!r}; allowed: a {kind} number of {self.unit}, {self.least} to {self.most:,}"
            )


LENGTHS: Final = Quantity("tokens", 1, MOST_TOKENS)
ADDED: Final = LENGTHS._replace(least=0)  # tokens that a tool adds
TURNS: Final = Quantity("turns", 1, MOST_TURNS)
SECONDS: Final = Quantity("seconds", 0, MOST_SECONDS, whole=False)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Equal numbers, such as lengths in tokens."""

    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _plain("fixed number", self.value))

    @property
    def largest(self) -> float:
        return self.value

    def check(self, quantity: Quantity) -> None:
        """Raise ConfigError for a number that the quantity does not have."""
        quantity.check("fixed number", self.value)

    def describe(self, unit: str = "tokens") -> dict[str, Any]:
        return {"kind": "fixed", unit: self.value}

    def draw(self, count: int, rng: np.random.Generator, quantity: Quantity = LENGTHS) -> NDArray[Any]:
        return np.full(count, self.value, dtype=quantity.dtype)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lognormal numbers, clipped to `max`, as a rollout clips responses. Whole quantities are rounded.

    mean:  of the distribution before clipping
    sigma: standard deviation of the natural log of a number
    """

    mean: float
    sigma: float
    max: float

    def __post_init__(self) -> None:
        _plain("lognormal mean", self.mean)
        object.__setattr__(self, "max", _plain("lognormal max", self.max))
        if self.mean <= 0:
            raise ConfigError(f"lognormal mean is {self.mean!r}; allowed: a number above 0")
        if not (is_number(self.sigma) and 0 <= self.sigma <= MOST_SIGMA):
            raise ConfigError(f"lognormal sigma is {self.sigma!r}; allowed: at least 0, at most {MOST_SIGMA:g}")

    @property
    def largest(self) -> float:
        return self.max

    def check(self, quantity: Quantity) -> None:
        """Raise ConfigError for a mean or a maximum that the quantity does not have."""
        quantity._replace(whole=False).check("lognormal mean", self.mean)
        quantity.check("lognormal max", self.max)

    def describe(self, unit: str = "tokens") -> dict[str, Any]:
        return {"kind": "lognormal", "mean": self.mean, "sigma": self.sigma, "max": self.max}

    def draw(self, count: int, rng: np.random.Generator, quantity: Quantity = LENGTHS) -> NDArray[Any]:
        median = math.log(self.mean) - self.sigma**2 / 2  # mean of a lognormal = exp(mu + sigma^2 / 2)
        drawn = rng.lognormal(median, self.sigma, count)
        if quantity.whole:
            drawn = np.rint(drawn)
        return np.clip(drawn, quantity.least, self.max).astype(quantity.dtype)


@dataclass(frozen=True, slots=True)
class Trace:
    """Observed numbers: used in order if `count` equals their number, else drawn with replacement."""

    values: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        if isinstance(self.values, str) or not len(self.values):
            raise ConfigError(f"the trace {self.source} has no numbers; give at least one row")
        values = tuple(self.values)
        if set(map(type, values)) != {int}:
            rows = enumerate(values, 1)
            values = tuple(_plain(f"the number in row {row} of {self.source}", value) for row, value in rows)
        object.__setattr__(self, "values", values)

    @property
    def largest(self) -> float:
        return max(self.values)

    def check(self, quantity: Quantity) -> None:
        """Raise ConfigError for the first number that the quantity does not have."""
        of_ints = set(map(type, self.values)) == {int}  # then the ends tell of a million rows
        if of_ints and quantity.least <= min(self.values) and max(self.values) <= quantity.most:
            return
        for row, value in enumerate(self.values, 1):
            quantity.check(f"the number in row {row} of {self.source}", value)

    def describe(self, unit: str = "tokens") -> dict[str, Any]:
        return {"kind": "trace", "source": self.source, "rows": len(self.values)}

    def draw(self, count: int, rng: np.random.Generator, quantity: Quantity = LENGTHS) -> NDArray[Any]:
        seen = np.array(self.values, dtype=quantity.dtype)
        return seen if count == len(seen) else rng.choice(seen, count)


Distribution = Fixed | LogNormal | Trace


def _plain(what: str, value: Any) -> int | float:
    """A number as int or, with a fraction, as float. Raises ConfigError for one that no quantity has."""
    if not is_number(value):
        raise ConfigError(f"{what} is {value!r}; allowed: a finite number")
    return int(value) if value == int(value) else float(value)


def distribution_of(name: str, value: Any, quantity: Quantity) -> Distribution:
    """An argument as a distribution of a quantity. Raises ConfigError, with `name`, for anything else.

    value: a distribution, or a number for all
    """
    if isinstance(value, (Fixed, LogNormal, Trace)):
        try:
            value.check(quantity)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        return value
    kinds = (int, np.integer) if quantity.whole else (int, float, np.integer, np.floating)
    if isinstance(value, kinds) and not isinstance(value, bool):
        number = value.item() if isinstance(value, np.generic) else value
        quantity.check(name, number)
        return Fixed(number)
    number = f"a whole number of {quantity.unit}" if quantity.whole else f"a number of {quantity.unit}"
    raise ConfigError(f"{name} is {value!r}; allowed: {number}, fp8plan.Fixed, fp8plan.LogNormal or fp8plan.Trace")


def parse_both_lengths(
    prompts: str | Distribution | None, responses: str | Distribution
) -> tuple[Distribution, Distribution, list[str]]:
    """Read both lengths as `parse_distribution` does. Returns (prompt lengths, response lengths, notes).

    prompts: None: those of the responses' trace, if it has any, else DEFAULT_PROMPTS

    Raises ConfigError as `parse_distribution` does, and for a trace with a likely typo of the name "prompt_length".
    """
    known = parse_distribution(responses, RESPONSE)
    if not isinstance(responses, str) or not isinstance(known, Trace):
        return parse_distribution(prompts or DEFAULT_PROMPTS, PROMPT), known, []
    columns = _columns(Path(responses))
    has_prompts = PROMPT in columns
    if prompts is not None:
        unread = has_prompts and prompts != responses
        note = f"{responses} has {PROMPT}, too, which is not read: --prompt-lengths {prompts} goes before it"
        return parse_distribution(prompts, PROMPT), known, [note] if unread else []
    if has_prompts:
        return parse_distribution(responses, PROMPT), known, [f"prompt lengths are those of {responses}, too"]
    if meant := nearest(PROMPT, columns, LIKE):
        raise ConfigError(
            f"the trace {responses} has {meant!r}, which is not read; call it {PROMPT!r}, or give --prompt-lengths"
        )
    return parse_distribution(DEFAULT_PROMPTS, PROMPT), known, []


def parse_distribution(text: str | Distribution, column: str, quantity: Quantity = LENGTHS) -> Distribution:
    """Read a distribution as the command line spells it: Quantity.syntax. One that is read already stays.

    column: the column of a trace file, such as "prompt_length"

    Raises ConfigError, with `column`, for any other text, and for a file that is missing, empty or has bad numbers.
    """
    try:
        value = _parsed(text, column, quantity) if isinstance(text, str) else text
    except ConfigError as error:
        raise ConfigError(f"{column}: {error}") from None
    return distribution_of(column, value, quantity)


def is_trace(text: str) -> bool:
    """True if the command line's word for a distribution is a trace file."""
    return Path(text).suffix in (".jsonl", ".parquet")


def _parsed(text: str, column: str, quantity: Quantity) -> Distribution:
    path = Path(text)
    if is_trace(text):
        return Trace(tuple(_read_column(path, column)), str(path))
    kind, colon, rest = text.partition(":")
    try:
        if kind == "fixed" or not colon:
            return Fixed(quantity.number(rest if colon else text))
        if kind == "lognormal":
            parts = [part.partition("=") for part in rest.split(",")]
            fields = {name: value for name, _, value in parts}
            if len(fields) < len(parts) or len(fields) > 3:
                raise ValueError("a name is given twice, or unknown")
            return LogNormal(float(fields["mean"]), float(fields["sigma"]), quantity.number(fields["max"]))
    except (ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
    raise ConfigError(f"cannot read {text!r}; {number_hint(text)}allowed: {quantity.syntax}")


def _read_column(path: Path, column: str) -> list[Any]:
    """One number per row: a bare one, or the value of `column`."""
    if path.suffix == ".parquet":
        names = _columns(path)
        if column not in names:
            raise ConfigError(f"the trace {path} has no column {column!r}; {_has(names, column)}")
        return _parquet(path, lambda file: file.read([column])[column].to_pylist())
    values = []
    for number, row in _rows(path, column):
        if isinstance(row, dict) and column not in row:
            wanted = f'a number, or an object with "{column}"'
            raise ConfigError(f"line {number} of the trace {path} is not {wanted}; {_has(list(row), column)}")
        values.append(row[column] if isinstance(row, dict) else row)
    return values


def _columns(path: Path) -> list[str]:
    """The columns of a trace file. JSON lines have those of the first row; bare numbers have none."""
    if path.suffix == ".parquet":
        return _parquet(path, lambda file: file.schema_arrow.names)
    first = next((row for _, row in _rows(path, RESPONSE)), None)
    return list(first) if isinstance(first, dict) else []


def _parquet(path: Path, read: Callable[[Any], list[Any]]) -> list[Any]:
    """The value of `read` for the pyarrow.parquet.ParquetFile at `path`. Raises ConfigError if it cannot be read."""
    if not path.exists():
        raise ConfigError(f"there is no trace file {path}")
    parquet = package("pyarrow.parquet", f"reading {path}", PARQUET)
    try:
        with parquet.ParquetFile(path) as file:
            return read(file)
    except Exception as error:  # pyarrow raises a type of its own per kind of damage
        raise ConfigError(f"cannot read the trace {path} as parquet: {error}") from None


def _rows(path: Path, column: str) -> list[tuple[int, Any]]:
    """(line number, value) of each line in a file of JSON lines, without blank lines."""
    return list(lines(path, "trace file", f'allowed: a number, or an object with "{column}"', whole=True))


def _has(names: list[str], column: str) -> str:
    """The end of an error: the columns of the file, and the likely intended one."""
    intended = nearest(column, names, LIKE)
    advice = f"call {intended!r} {column!r}" if intended else "add it"
    return f"it has {', '.join(map(str, names)) or 'nothing'}: {advice}"
