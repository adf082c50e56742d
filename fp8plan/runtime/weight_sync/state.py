"""What an engine's syncs are made of: settings, what is remembered between them, what is asked of the engine, and the
report."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal, NamedTuple

from fp8plan.errors import ConfigError, LostEngineError
from fp8plan.model.precision import precision
from fp8plan.runtime.weight_sync.kv_scales import MARGIN, Scales
from fp8plan.runtime.weight_sync.manifest import FORMATS, Manifest


class Call(NamedTuple):
    """One thing to do to an engine, with its arguments.

    rpc:      (method, args) on every worker; answered by a list
    reset:    empty the prefix cache
    generate: (prompts as token ids, SamplingParams settings); answered by RequestOutputs
    restart:  end vLLM and start it again
    sleep, wake_up: (level,) and (tags,), as vLLM takes them
    """

    what: Literal["rpc", "reset", "generate", "restart", "sleep", "wake_up"]
    arguments: tuple[Any, ...] = ()


Procedure = Generator[Call, Any, Any]


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """weights_in:  "bf16" or "fp8_block": what is sent (manifest.FORMATS)
    in_place:    write the live tensors where that is proven to equal vLLM's reload; False: always vLLM's reload
    chunk_bytes: of one message of tensors
    rollback:    None, or where to keep a copy of the weights to return to: "cpu" or "cuda"
    samples:     tensors compared after a sync
    kv_margin:   room above the largest magnitudes seen
    scored_k3:   mean k3 per token of a scored sequence above which a sync has failed; FP8 shows 0.001 to 0.03, wrong
                 weights more than 1
    """

    weights_in: str = "bf16"
    in_place: bool = True
    chunk_bytes: int = 1 << 30
    rollback: str | None = None
    samples: int = 4
    kv_margin: float = MARGIN
    scored_k3: float = 0.5

    @classmethod
    def planned(cls, preset: str, remote: bool) -> SyncSettings:
        """What a plan's precision asks for: BF16 where the tensors lie on the engine's GPUs (quantising there is one
        read and one write), E4M3 and scales, half the bytes, where they come over a link (`remote`) into FP8."""
        return cls(weights_in="fp8_block" if remote and precision(preset).weights == "fp8_block" else "bf16")

    def __post_init__(self) -> None:
        if self.weights_in not in FORMATS:
            raise ConfigError(f"weights_in is {self.weights_in!r}; allowed: {', '.join(FORMATS)}")
        if self.chunk_bytes < 1 or self.samples < 0 or not self.kv_margin >= 1:
            raise ConfigError("allowed: chunk_bytes above 0, samples of 0 or more, kv_margin of 1 or more")
        if self.rollback not in (None, "cpu", "cuda"):
            raise ConfigError(f"rollback is {self.rollback!r}; allowed: None, 'cpu', 'cuda' (where the copy is kept)")


class Scored(NamedTuple):
    """Token ids of a sequence, and the trainer's log-probs of all but the first (temperature 1)."""

    tokens: Sequence[int]
    logprobs: Sequence[float]


class Checked(NamedTuple):
    """A manifest that the workers take: its number there, the group of each tensor, and how many are in each group."""

    number: int
    groups: Sequence[int]
    sizes: Mapping[int, int]
    numbers: Mapping[str, int]


@dataclass(slots=True)
class SyncState:
    """What an engine knows between two syncs.

    refusal:   why it must not generate; None while it serves
    running:   a sync, a calibration or a step down is under way; generating: calls of generate are
    shut_down: for good, by its owner
    asleep:    what sleeps, by vLLM's tags: "weights", "kv_cache"; since a sleep at sleep_level, 0 if that has not ended
    soiled:    weights that were not proven have run: the KV cache may hold NaN, which poisons who gets its block next
    expected:  tensors of the checkpoint it was started with, where known
    prepared:  manifests that the workers have checked
    kv_scales: what the live engine has; None with a BF16 KV cache
    longest_prompt, vocabulary: that the engine takes, in tokens, where known
    """

    settings: SyncSettings
    staged_on: str | None
    fp8_kv: bool
    refusal: str | None = None
    dead: bool = False
    shut_down: bool = False
    running: bool = False
    generating: int = 0
    asleep: frozenset[str] = frozenset()
    sleep_level: int = 0
    soiled: bool = False
    version: int = 0
    expected: Manifest | None = None
    prepared: dict[tuple[Manifest, bool], Checked] = field(default_factory=dict)
    kv_scales: Scales | None = None
    longest_prompt: int | None = None
    vocabulary: int | None = None
    quantised: tuple[str, ...] = ()
    lock: Lock = field(default_factory=Lock)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync did.

    version:      number of the weights that serve now, counted from 1
    seconds:      of each phase (prepare, begin, load, finish, kv_scales, reset, score) and "total"; "check" is what the
                  self-check took of begin, load and finish
    tensors, bytes: sent
    chunks:       messages
    layers:       dtype of their weights -> modules of one rank
    in_place, reloaded: modules written directly, and by vLLM's layerwise reload
    why_reloaded: kind of module -> why vLLM must load it
    ignored:      tensors that vLLM leaves out (a tied lm_head)
    compared:     sampled tensors written in place that are what was sent (live/self_check.py); 0 if vLLM reloads all
    weight_error: RMS error of the sampled quantised weights, a fraction: 2.6% for Gaussian ones; reported, not judged
    kv_scales:    layer -> scales of q, k, v; None with a BF16 KV cache
    kv_source:    where they come from
    scored_k3:    mean k3 per token of the scored sequence; None without one
    """

    version: int
    seconds: Mapping[str, float]
    tensors: int
    bytes: int
    chunks: int
    layers: Mapping[str, int]
    in_place: int
    reloaded: int
    why_reloaded: Mapping[str, str]
    ignored: Sequence[str]
    compared: int
    weight_error: float | None
    kv_scales: Scales | None
    kv_source: str | None
    scored_k3: float | None

    def __str__(self) -> str:
        """One line for a log."""
        said = [f"weights {self.version} serve: {self.tensors} tensors, {self.bytes / 1e6:,.1f} MB"]
        said[0] += f" in {self.seconds['total']:.3f} s"
        said += [f"{self.in_place} modules written in place, {self.reloaded} reloaded by vLLM"]
        said += [f"{self.compared} samples as sent"]
        said += [] if self.weight_error is None else [f"weight error {self.weight_error:.2%}"]
        said += [] if self.kv_source is None else [f"KV scales from {self.kv_source}"]
        said += [] if self.scored_k3 is None else [f"k3 {self.scored_k3:.1e} to the trainer"]
        return ", ".join(said)


def rpc(method: str, *arguments: Any) -> Generator[Call, Any, list[Any]]:
    """Every worker's answer. Raises ConfigError with the first error among them; LostEngineError, if one of them says
    that the engine is lost."""
    answers = yield Call("rpc", (method, arguments))
    kind = LostEngineError if any(answer.get("lost") for answer in answers) else ConfigError
    for rank, answer in enumerate(answers):
        if "error" in answer:
            where = f"rank {rank}: " if len(answers) > 1 else ""
            raise kind(f"{where}{answer['error']}")
    return [answer["ok"] for answer in answers]
