"""The workload of a rollout: the numbers of prompts and samples, and their lengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8plan.checks import is_number, nearest, number_hint, whole
from fp8plan.errors import ConfigError
from fp8plan.jsonl import lines
from fp8plan.model.turns import TurnTable
from fp8plan.options import WORKLOAD, Option, group_of

PROMPT, RESPONSE = "prompt_length", "response_length"  # columns of a trace
LIKE = 0.85  # similarity from which a column's name counts as a typo of these
DEFAULT_PROMPTS = "fixed:1024"
# The rollout of DAPO (arXiv 2503.14476) on one GPU, for a command that is told nothing else.
PROMPTS, SAMPLES, SEED = 32, 16, 0
RESPONSES = "lognormal:mean=6000,sigma=0.9,max=20480"
LENGTHS_SYNTAX = "fixed:TOKENS, lognormal:mean=TOKENS,sigma=S,max=TOKENS, or a .jsonl or .parquet file of lengths"

# Far above any context or rollout, and low enough for int64 sums over a batch.
MOST_TOKENS = 10**9
MOST_REQUESTS = 10**7
MOST_SIGMA = 10.0  # rollouts have about 1


class Batch(NamedTuple):
    """Requests in order of arrival, or trajectories of several turns: int64 arrays of shape (requests,)."""

    prompts: NDArray[np.int64]  # prompt tokens, at least 1
    responses: NDArray[np.int64]  # response tokens, at least 1; of all turns
    prompt_ids: NDArray[np.int64]  # the number of the request's prompt, 0 .. prompts-1
    turns: TurnTable | None = None  # None: one turn each

    @property
    def longest(self) -> int:
        """Prompt + response tokens of the longest request, with what tools add."""
        added = self.responses if self.turns is None else self.turns.added
        return int((self.prompts + added).max())

    def split(self, replicas: int) -> list[Batch]:
        """Consecutive, nearly equal parts, as RL trainers split a batch between data-parallel replicas.

        Replicas without a request are left out. If `replicas` does not divide the batch, samples of one prompt may be
        parted.
        """
        if replicas == 1:
            return [self]
        bounds = np.linspace(0, len(self.prompts), min(replicas, len(self.prompts)) + 1).astype(int)
        return [self.take(slice(a, b)) for a, b in itertools.pairwise(bounds)]

    def take(self, rows: Any) -> Batch:
        """Some of the requests with their prompts renumbered. rows: an index of numpy's"""
        prompt_ids = np.unique(self.prompt_ids[rows], return_inverse=True)[1].astype(np.int64)
        turns = None if self.turns is None else self.turns.take(rows)
        return Batch(self.prompts[rows], self.responses[rows], prompt_ids, turns)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Equal lengths of `tokens`."""

    tokens: int

    def __post_init__(self) -> None:
        _check_length("fixed length", self.tokens, whole=True)
        object.__setattr__(self, "tokens", int(self.tokens))

    @property
    def longest(self) -> int:
        return self.tokens

    def describe(self) -> dict[str, Any]:
        return {"kind": "fixed", "tokens": self.tokens}

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lognormal lengths, rounded and clipped to 1 .. max, as a rollout clips responses.

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
        object.__setattr__(self, "max", int(self.max))
        if not (is_number(self.sigma) and 0 <= self.sigma <= MOST_SIGMA):
            raise ConfigError(f"lognormal sigma is {self.sigma!r}; allowed: at least 0, at most {MOST_SIGMA:g}")

    @property
    def longest(self) -> int:
        return self.max

    def describe(self) -> dict[str, Any]:
        return {"kind": "lognormal", "mean": self.mean, "sigma": self.sigma, "max": self.max}

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        median = math.log(self.mean) - self.sigma**2 / 2  # mean of a lognormal = exp(mu + sigma^2 / 2)
        return np.clip(np.rint(rng.lognormal(median, self.sigma, count)), 1, self.max).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Trace:
    """Observed lengths: used in order if `count` equals their number, else drawn with replacement."""

    lengths: tuple[int, ...]
    source: str

    def __post_init__(self) -> None:
        if isinstance(self.lengths, str) or not len(self.lengths):
            raise ConfigError(f"the trace {self.source} has no lengths; give at least one row")
        if set(map(type, self.lengths)) != {int} or min(self.lengths) < 1 or max(self.lengths) > MOST_TOKENS:
            for row, length in enumerate(self.lengths):
                _check_length(f"length in row {row + 1} of {self.source}", length, whole=True)
        object.__setattr__(self, "lengths", tuple(map(int, self.lengths)))

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def describe(self) -> dict[str, Any]:
        return {"kind": "trace", "source": self.source, "rows": len(self.lengths)}

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        seen = np.array(self.lengths, dtype=np.int64)
        return seen if count == len(seen) else rng.choice(seen, count)


Lengths = Fixed | LogNormal | Trace


class Turns(NamedTuple):
    """The tool output in the responses of a recorded workload, which is not in its response lengths.

    tool_share:    share of tool output and users' turns in the tokens of all responses
    several_share: share of the responses with several turns
    unclear_share: share of the responses whose tool output is not known, and counts as generated
    longest:       tokens of the longest response with its tool output
    """

    tool_share: float = 0.0
    several_share: float = 0.0
    unclear_share: float = 0.0
    longest: int = 0

    def describe(self) -> dict[str, Any]:
        """The shares as a plan keeps them; empty without any."""
        return {"turns": self._asdict()} if self.tool_share or self.unclear_share else {}

    def sentence(self) -> tuple[str, ...]:
        """The first reason of a plan of such a workload; none without tool output."""
        parts = list[str]()
        if self.tool_share:
            parts.append(
                f"The responses are of several turns ({self.several_share:.1%} of them): {self.tool_share:.1%} of "
                "their tokens are tool output, which no engine generates."
            )
        if self.unclear_share:
            parts.append(
                f"In {self.unclear_share:.1%} of the responses the log cannot tell tool output from generated tokens, "
                "so the lengths may count it."
            )
        if parts:
            parts.append("Waits for tools, the prefill of their output and its KV cache are not modelled.")
        return (" ".join(parts),) if parts else ()


SINGLE: Final = Turns()  # responses of one turn, as far as is known


@dataclass(frozen=True, slots=True, init=False)
class Workload:
    """One rollout of an RL step: `prompts` prompts, `samples_per_prompt` responses to each.

    prompt_lengths, response_lengths: a whole number of tokens for all, or Fixed, LogNormal or Trace
    seed:                             of drawn lengths
    turns:                            tool output of a recorded rollout, which is not in response_lengths
    """

    prompts: Annotated[int, Option(WORKLOAD, default=f"{PROMPTS}")]
    samples_per_prompt: Annotated[int, Option(WORKLOAD, "responses per prompt", f"{SAMPLES}", "--samples")]
    prompt_lengths: Annotated[
        Lengths,
        Option(
            WORKLOAD,
            "fixed:TOKENS, lognormal:mean=TOKENS,sigma=S,max=TOKENS (mean before clipping), or a .jsonl/.parquet trace",
            f"those of the responses' trace, else {DEFAULT_PROMPTS}",
            kind=str,
        ),
    ]
    response_lengths: Annotated[Lengths, Option(WORKLOAD, "the same", RESPONSES, kind=str)]
    seed: Annotated[int, Option(WORKLOAD, "of lengths that are drawn", f"{SEED}")]
    turns: Turns

    def __init__(
        self,
        prompts: int,
        samples_per_prompt: int,
        prompt_lengths: Lengths | int,
        response_lengths: Lengths | int,
        seed: int = 0,
        turns: Turns = SINGLE,
    ) -> None:
        """Raises ConfigError for anything but whole numbers and lengths, and for more than MOST_REQUESTS responses."""
        fields = {
            "prompts": whole("prompts", prompts),
            "samples_per_prompt": whole("samples_per_prompt", samples_per_prompt),
            "prompt_lengths": _lengths("prompt_lengths", prompt_lengths),
            "response_lengths": _lengths("response_lengths", response_lengths),
            "seed": whole("seed", seed, 0),
            "turns": turns,
        }
        if not isinstance(turns, Turns):
            raise ConfigError(f"turns is {turns!r}; allowed: what fp8plan.recorded_workload gives")
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if self.prompts * self.samples_per_prompt > MOST_REQUESTS:
            raise ConfigError(
                f"prompts x samples_per_prompt is {self.prompts} x {self.samples_per_prompt}; allowed: at most "
                f"{MOST_REQUESTS:,} responses"
            )

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response, with its tool output."""
        return max(self.response_lengths.longest, self.turns.longest)

    def batch(self) -> Batch:
        """The requests, prompt by prompt, with samples of a prompt next to each other. The seed decides the lengths.

        Prompt and response lengths are independent, except in a trace with one row per response. Its rows are taken in
        order, and the first row of each prompt has the prompt's length.
        """
        rng = np.random.default_rng(self.seed)
        prompt_ids = np.repeat(np.arange(self.prompts, dtype=np.int64), self.samples_per_prompt)
        if isinstance(self.prompt_lengths, Trace) and len(self.prompt_lengths.lengths) == len(prompt_ids):
            prompts = self.prompt_lengths.draw(len(prompt_ids), rng)[:: self.samples_per_prompt]
        else:
            prompts = self.prompt_lengths.draw(self.prompts, rng)
        return Batch(prompts[prompt_ids], self.response_lengths.draw(len(prompt_ids), rng), prompt_ids)


WORKLOAD_OPTIONS: Final = group_of(Workload)


def _lengths(name: str, value: Any) -> Lengths:
    if isinstance(value, (Fixed, LogNormal, Trace)):
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return Fixed(int(value))
    kinds = "a whole number of tokens, fp8plan.Fixed, fp8plan.LogNormal or fp8plan.Trace"
    raise ConfigError(f"{name} is {value!r}; allowed: {kinds}")


def parse_both_lengths(prompts: str | None, responses: str) -> tuple[Lengths, Lengths, list[str]]:
    """Read both lengths as the command line spells them. Returns (prompt lengths, response lengths, notes).

    prompts: None: those of the responses' trace, if it has any, else DEFAULT_PROMPTS

    Raises ConfigError as `parse_lengths` does, and for a trace with a likely typo of the name "prompt_length".
    """
    known = parse_lengths(responses, RESPONSE)
    if not isinstance(known, Trace):
        return parse_lengths(prompts or DEFAULT_PROMPTS, PROMPT), known, []
    columns = _columns(Path(responses))
    has_prompts = PROMPT in columns
    if prompts is not None:
        unread = has_prompts and prompts != responses
        note = f"{responses} has {PROMPT}, too, which is not read: --prompt-lengths {prompts} goes before it"
        return parse_lengths(prompts, PROMPT), known, [note] if unread else []
    if has_prompts:
        return parse_lengths(responses, PROMPT), known, [f"prompt lengths are those of {responses}, too"]
    if meant := nearest(PROMPT, columns, LIKE):
        raise ConfigError(
            f"the trace {responses} has {meant!r}, which is not read; call it {PROMPT!r}, or give --prompt-lengths"
        )
    return parse_lengths(DEFAULT_PROMPTS, PROMPT), known, []


def parse_lengths(text: str, column: str) -> Lengths:
    """Read lengths as the command line spells them: LENGTHS_SYNTAX.

    column: the column of a trace file, "prompt_length" or "response_length"

    Raises ConfigError for any other text, and for a file that is missing, empty or has bad lengths.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "fixed":
            return Fixed(int(rest))
        if kind == "lognormal":
            parts = [part.partition("=") for part in rest.split(",")]
            fields = {name: value for name, _, value in parts}
            if len(fields) < len(parts) or len(fields) > 3:
                raise ValueError("a name is given twice, or unknown")
            return LogNormal(float(fields["mean"]), float(fields["sigma"]), int(fields["max"]))
    except (ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _unread(text) from None
    path = Path(text)
    if path.suffix in (".jsonl", ".parquet"):
        return Trace(tuple(_read_column(path, column)), str(path))
    raise _unread(text)


def _unread(text: str) -> ConfigError:
    """The error for lengths in another spelling, which says what to type for a number."""
    hint = number_hint(f"fixed:{text}" if text[:1].isdigit() else text)
    if text.isdigit():
        hint = f"type fixed:{text} if all are so long, or lognormal:mean=TOKENS,sigma=S,max={text} if at most; "
    return ConfigError(f"cannot read the lengths {text!r}; {hint}allowed: {LENGTHS_SYNTAX}")


def _read_column(path: Path, column: str) -> list[Any]:
    """One length per row: a bare number, or the value of `column`."""
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
    import pyarrow.parquet as pq

    if not path.exists():
        raise ConfigError(f"there is no trace file {path}")
    try:
        with pq.ParquetFile(path) as file:
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


def _check_length(what: str, tokens: Any, whole: bool = False) -> None:
    if not is_number(tokens) or not 1 <= tokens <= MOST_TOKENS or (whole and tokens != int(tokens)):
        kind = "whole" if whole else "finite"
        raise ConfigError(f"{what} is {tokens!r}; allowed: a {kind} number of tokens, 1 to {MOST_TOKENS:,}")
