"""The parts of an engine's syncs: settings, the state between two of them, the Calls to the engine, and the report."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar, cast

from fp8plan.checks import instance, whole
from fp8plan.errors import ConfigError, LostEngineError
from fp8plan.model.precision import precision
from fp8plan.model.weight_changes import TopK
from fp8plan.runtime.interrupts import let_in, released
from fp8plan.runtime.weight_sync.delta.base import Base
from fp8plan.runtime.weight_sync.kv_scales import MARGIN, Scales
from fp8plan.runtime.weight_sync.manifest import FORMATS, Manifest
from fp8plan.runtime.weight_sync.transitions import Event, State, Weights, after


class Call(NamedTuple):
    """One thing to do to an engine, with its arguments.

    rpc:      (method, args) on every worker; answered by a list
    reset:    empty the prefix cache
    generate: (prompts as token ids, SamplingParams settings); answered by RequestOutputs
    score:    the same on every replica; answered by a list of RequestOutputs for each
    restart:  end vLLM and start it again
    sleep, wake_up: (level,) and (tags,), as vLLM takes them
    files:    (function, its arguments...): work on files, without the engine. `driven` does it, under asyncio in a
              thread; answered by what it returns
    """

    what: Literal["rpc", "reset", "generate", "score", "restart", "sleep", "wake_up", "files"]
    arguments: tuple[Any, ...] = ()


Procedure = Generator[Call, Any, Any]
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """Settings of an engine's syncs.

    weights_in:  format that is sent: "bf16", or "fp8_block" (E4M3 and FP32 scales where the engine holds FP8, see
                 manifest.FORMATS)
    in_place:    write live tensors directly where a trial has shown vLLM's own bits; False: always reload by vLLM
    chunk_bytes: size of one message of tensors
    rollback:    "cpu" or "cuda": keep a copy of the weights there, to return to after a failure; None: no copy
    delta:       "cpu" or "cuda": keep a copy of what the engine holds there, send only what has changed, and imply
                 weights_in="fp8_block"; None: send all weights
    top_k:       with delta, send the most useful changes only; None: all of them, so that no bit differs
    look_every:  with delta, tensors that do not change are compared with the engine's all the same, each once in so
                 many syncs; 0: never. An engine whose memory something else has written to gets all weights
    samples:     tensors that are compared with the sent ones after a sync
    kv_margin:   KV scales hold this many times the largest magnitudes seen
    scored_k3:   a sync fails above this mean k3 per token of the scored sequence. FP8 shows 0.001 to 0.03, wrong
                 weights more than 1

    Raises ConfigError for values out of range.
    """

    weights_in: str = "bf16"
    in_place: bool = True
    chunk_bytes: int = 1 << 30
    rollback: str | None = None
    delta: str | None = None
    top_k: TopK | None = None
    look_every: int = 20
    samples: int = 4
    kv_margin: float = MARGIN
    scored_k3: float = 0.5

    @classmethod
    def planned(cls, preset: str, remote: bool) -> SyncSettings:
        """Return the settings for a preset. FP8 engines get E4M3 and scales over a link (`remote`): half the bytes.

        Else BF16 is sent: on the engine's own GPUs quantising is one read and one write.
        """
        return cls(weights_in="fp8_block" if remote and precision(preset).weights == "fp8_block" else "bf16")

    def __post_init__(self) -> None:
        if self.weights_in not in FORMATS:
            raise ConfigError(f"weights_in is {self.weights_in!r}; allowed: {', '.join(FORMATS)}")
        if self.chunk_bytes < 1 or self.samples < 0 or not self.kv_margin >= 1:
            raise ConfigError("allowed: chunk_bytes above 0, samples of 0 or more, kv_margin of 1 or more")
        whole("look_every", self.look_every, 0)
        for name in ("rollback", "delta"):
            if (place := getattr(self, name)) not in (None, "cpu", "cuda"):
                raise ConfigError(f"{name} is {place!r}; allowed: None, 'cpu', 'cuda' (where the copy is kept)")
        if self.top_k is not None:
            instance("top_k", self.top_k, TopK, "TopK(share=1e-4)")
        if self.top_k is not None and self.delta is None:
            raise ConfigError("top_k is set without delta; type: SyncSettings(delta='cpu', top_k=TopK(share=1e-4))")
        if self.delta is not None:
            object.__setattr__(self, "weights_in", "fp8_block")


class Scored(NamedTuple):
    """A sequence's token ids, and the trainer's log-probs of all but the first, in nats, at temperature 1."""

    tokens: Sequence[int]
    logprobs: Sequence[float]


class Checked(NamedTuple):
    """A manifest that the workers take.

    number:  number of the manifest in the workers
    groups:  number of each tensor's group: fused tensors must come together
    sizes:   group -> how many tensors it has
    numbers: name -> number of the tensor in the manifest
    reloaded: name of each tensor that vLLM must reload -> number of its group
    twins:   groups of names that share one storage in the engine, sent or not (weight_sync.shared)
    """

    number: int
    groups: Sequence[int]
    sizes: Mapping[int, int]
    numbers: Mapping[str, int]
    reloaded: Mapping[str, int] = MappingProxyType({})
    twins: Sequence[Sequence[str]] = ()


@dataclass(slots=True)
class SyncState:
    """An engine's weights, and what a sync must know of the engine.

    staged_on:  device of the memory that tensors go through to another process; None: the engine is in this one
    workers:    number of vLLM's workers, which open that memory
    weights:    whether they serve, and how far a sync has come
    running:    True while a sync, a calibration or a step down is under way
    generating: calls of generate under way
    asleep:     vLLM's tags that sleep: "weights", "kv_cache"
    sleep_level: level of that sleep; 0 if falling asleep has not ended
    soiled:     True if unproven weights have run, which may have left NaN in the KV cache for the next request
    version:    number of the weights that serve
    stamp:      name of those weights, which their workers keep, too; None for the checkpoint's
    expected:   tensors of the checkpoint it was started with, where known
    prepared:   manifests that the workers have checked
    base:       the trainer's copy of the weights that serve, where syncs send only what has changed
    kv_scales:  scales of the live engine; None with a BF16 KV cache
    kv_fixed:   True if its attention keeps the scales that it started with (kv_scales.FIXED_SCALES)
    kv_clipped: layers that fixed scales clip -> largest |k| or |v| over what their scales can store
    longest_prompt, vocabulary: limits of the engine, in tokens, where known
    quantised:  names of the checkpoint's tensors that the engine holds in FP8; None until asked
    wide:       names of those that it keeps in FP32, asked with `quantised`
    said_rounded: True once it was said that FP32 is rounded
    """

    settings: SyncSettings
    staged_on: str | None
    fp8_kv: bool
    workers: int = 1
    weights: Weights = field(default_factory=Weights)
    running: bool = False
    generating: int = 0
    asleep: frozenset[str] = frozenset()
    sleep_level: int = 0
    soiled: bool = False
    version: int = 0
    stamp: str | None = None
    expected: Manifest | None = None
    prepared: dict[tuple[Manifest, bool], Checked] = field(default_factory=dict)
    base: Base | None = None
    kv_scales: Scales | None = None
    kv_fixed: bool = False
    kv_clipped: Mapping[str, float] = field(default_factory=dict)
    longest_prompt: int | None = None
    vocabulary: int | None = None
    quantised: tuple[str, ...] | None = None
    wide: frozenset[str] = frozenset()
    said_rounded: bool = False
    lock: Lock = field(default_factory=Lock)

    def note(self, event: Event, why: str | None = None) -> None:
        """Note what has happened to the weights. Raises as `transitions.after` does."""
        self.weights = after(self.weights, event, why)

    @property
    def refusal(self) -> str | None:
        """The reason why the engine must not generate; None while it serves."""
        return self.weights.why

    @property
    def dead(self) -> bool:
        """Whether the engine has died, so that the next sync starts it again."""
        return self.weights.state is State.DEAD

    @property
    def shut_down(self) -> bool:
        """Whether its owner has shut it down, for good."""
        return self.weights.state is State.CLOSED


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The report of a sync.

    version:      number of the weights that serve now, counted from 1
    seconds:      time of each phase (prepare, begin, load, finish, kv_scales, reset, score) and "total"; "check" is the
                  self-check's part of begin, load and finish
    tensors, bytes: sent in all
    patched:      True if only what has changed was sent
    looked:       unchanged tensors whose digests were sent, and equal the engine's (SyncSettings.look_every)
    healed:       why patches were refused and all weights sent; None: they were not
    rounded:      tensors that came in FP32, and that the engine holds in BF16 or FP8
    residual:     RMS of the changes that top_k has left out, over that of the weights; 0 without top_k. After
                  Follower.pull it is 0, because only the Publisher knows it
    chunks:       number of messages
    layers:       dtype of their weights -> modules of one rank
    in_place, reloaded: modules written directly, and by vLLM's layerwise reload
    why_reloaded: kind of module -> why vLLM must load it
    ignored:      tensors that vLLM leaves out (a tied lm_head)
    compared:     sampled tensors written in place that equal the sent ones (Samples in runtime.worker.comparison); 0
                  if vLLM reloads all
    weight_error: RMS error of the sampled quantised weights, a fraction: 2.6% for Gaussian ones; reported, not judged
    kv_scales:    layer -> scales of q, k, v; None with a BF16 KV cache
    kv_source:    name of their source
    kv_clipped:   layers that fixed scales clip -> largest |k| or |v| over what their scales can store
    scored_k3:    mean k3 per token of the scored sequence; None without one
    checks:       result of each worker's self-check, by rank: "compared", "weight_error", "seconds"
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
    checks: Sequence[Mapping[str, Any]] = ()
    patched: bool = False
    looked: int = 0
    healed: str | None = None
    residual: float = 0.0
    rounded: int = 0
    kv_clipped: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line for a log."""
        what = "patches" if self.patched else "tensors"
        text = f"weights {self.version} serve: {self.tensors} {what}, {self.bytes / 1e6:,.1f} MB"
        text += f" in {self.seconds['total']:.3f} s, {self.in_place} modules written in place"
        text += f", {self.reloaded} reloaded by vLLM, {self.compared} samples as sent"
        text += f", {self.looked} unchanged ones compared" if self.looked else ""
        text += "" if self.healed is None else f", all sent because {self.healed}"
        text += "" if self.weight_error is None else f", weight error {self.weight_error:.2%}"
        text += f", {self.rounded} rounded from FP32" if self.rounded else ""
        text += "" if self.kv_source is None else f", KV scales from {self.kv_source}"
        text += f", {len(self.kv_clipped)} layer(s) clip K or V" if self.kv_clipped else ""
        return text + ("" if self.scored_k3 is None else f", k3 {self.scored_k3:.1e} to the trainer")


def rpc(method: str, *arguments: Any) -> Generator[Call, Any, list[Any]]:
    """Call a method of every worker, and return their answers.

    Raises ConfigError with the first error among them, or LostEngineError if the engine is lost. "who" in an answer
    names its worker; otherwise its rank does.
    """
    answers = yield Call("rpc", (method, arguments))
    kind = LostEngineError if any(answer.get("lost") for answer in answers) else ConfigError
    for rank, answer in enumerate(answers):
        if "error" in answer:
            where = f"{answer.get('who', f'rank {rank}')}: " if len(answers) > 1 or "who" in answer else ""
            raise kind(f"{where}{answer['error']}")
    return [answer["ok"] for answer in answers]


def _with_files(act: Callable[..., Any], *arguments: Any) -> Any:
    with released():  # Ctrl-C may break it off anywhere
        return act(*arguments)


def driven(procedure: Generator[Call, Any, Answer], answer: Callable[[Call], Any]) -> Answer:
    """Run a procedure to its end. answer: does a Call to the engine"""
    try:
        call = next(procedure)
        while True:
            try:
                let_in()
                reply = _with_files(*call.arguments) if call.what == "files" else answer(call)
            except BaseException as error:
                call = procedure.throw(error)
            else:
                call = procedure.send(reply)
    except StopIteration as end:
        return cast("Answer", end.value)
