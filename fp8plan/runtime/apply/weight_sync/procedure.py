"""One sync of new policy weights into a live engine, as a procedure that does no input or output itself.

`replace_weights` is a generator: it yields each Call to the engine, and is sent the answer. So one procedure serves an
engine in this process, in another, and under asyncio. The order of the steps keeps garbage out:

1. the manifest (names, dtypes, shapes) is checked here and by a dry run in every worker: an error leaves the old
   weights serving, untouched;
2. the tensors stream in, by complete fused groups; the first write makes the engine refuse to generate;
3. every worker closes its sync: nothing missing, nothing NaN or Inf, a sample as it was sent (worker/live_weights.py);
4. KV scales are measured or set, the prefix cache is emptied, a sequence that the trainer has scored is scored, and the
   engine serves again.

A failure after the first write leaves it refusing until a complete sync, or, with a copy kept, on the old weights.
With many workers, and with the replicas of a fleet, this is a commit in two phases: every step asks all of them, the
first refusal ends the sync in all, and "commit" comes last.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from fp8plan.errors import ConfigError, LostEngineError, NotServingError, SyncError, warn
from fp8plan.runtime.apply.weight_sync.calls import Call, Method, Procedure, Reset, rpc
from fp8plan.runtime.apply.weight_sync.delta.base import Base, Chain
from fp8plan.runtime.apply.weight_sync.delta.patch import changed_values
from fp8plan.runtime.apply.weight_sync.delta.top_k import refuse_codes
from fp8plan.runtime.apply.weight_sync.kv_calibration import clean, kv_scales, refuse_calibration
from fp8plan.runtime.apply.weight_sync.kv_scales import Scales
from fp8plan.runtime.apply.weight_sync.manifest import (
    SCALE_SUFFIX,
    Manifest,
    as_held,
    held_manifest,
    manifest_of,
    pairs_of,
    quantised_manifest,
    read_manifest,
    refuse,
    refuse_quantising,
    rounding,
)
from fp8plan.runtime.apply.weight_sync.nccl import RemoteSource, broadcast, received
from fp8plan.runtime.apply.weight_sync.report import SyncReport
from fp8plan.runtime.apply.weight_sync.scored import Scored, refuse_scored, score
from fp8plan.runtime.apply.weight_sync.state import DIED, Checked, Event, SyncState
from fp8plan.runtime.apply.weight_sync.stream import ALIGNMENT, Channel, chunks, loose_chunks

# Manifests that workers remember. A trainer sends the same one every step, or one of few.
MOST_PREPARED = 4

Sent = Generator[Call, Any, list[Any]]  # its answers are the reports of the workers
ANY = ""  # stamp of patches that hold all tensors, whatever the engine has


def announced(state: SyncState, source: Any, manifest: Any) -> Manifest:
    """Return the manifest of the tensors to come. Raises ConfigError for errors that show without the engine."""
    own = source.manifest if isinstance(source, Chain) else manifest_of(source)
    expected = state.expected
    if expected is not None and state.settings.weights_in == "fp8_block":
        expected = quantised_manifest(expected, state.quantised or ())
    own = read_manifest(manifest) if manifest is not None else own
    if isinstance(source, RemoteSource) and source.send is None and state.settings.delta is not None:
        raise ConfigError(
            "delta compares the trainer's tensors, which are in another process; allowed: transfer.source(tensors) in "
            "this one, or SyncSettings(delta=None)"
        )
    if own is not None and state.settings.top_k is not None:
        for entry in own:
            refuse_codes(entry.name, entry.dtype)
    if own is not None and state.settings.delta is not None:
        refuse_quantising(own, state.quantised or ())
        own = held_manifest(own, state.quantised or (), state.wide)
    sent = expected if own is None else own
    if sent is None:
        raise ConfigError(
            "an iterator does not say what it will send, and the engine has no checkpoint to compare with; allowed: "
            "manifest=[(name, dtype, shape), ...] with it, or a dict, a list of pairs, or vLLM's WeightSource"
        )
    if (sent, state.settings.in_place) not in state.prepared:
        refuse(sent, expected, state.settings.weights_in)
    return sent


def prepared(state: SyncState, manifest: Manifest) -> Generator[Call, Any, Checked]:
    """Let the workers check a manifest, once. They remember the last MOST_PREPARED manifests."""
    key = (manifest, state.settings.in_place)
    if key not in state.prepared:
        if len(state.prepared) == MOST_PREPARED:
            state.prepared.pop(next(iter(state.prepared)))
        used = {checked.number for checked in state.prepared.values()}
        number = next(number for number in range(MOST_PREPARED) if number not in used)
        answers = yield from rpc("fp8plan_prepare", manifest, state.settings.in_place, number)
        groups = answers[0]["groups"]
        refuse_leftovers(manifest, [answer["taken"] for answer in answers])
        numbers = {entry.name: number for number, entry in enumerate(manifest)}
        natives = sorted({number for answer in answers for number in answer["reloaded"]})
        reloaded = {manifest[number].name: groups[number] for number in natives}
        twins = list({tuple(group): None for answer in answers for group in answer["twins"]})
        state.prepared[key] = Checked(number, groups, Counter(groups), numbers, reloaded, twins)
    return state.prepared[key]


def learn_quantised(state: SyncState) -> Procedure:
    """Ask the workers which of the checkpoint's tensors the engine holds in FP8 or FP32.

    Does nothing if that is known already, or without the checkpoint's files. No sync uses the number of its manifest.
    """
    if state.quantised is not None or state.expected is None:
        return
    answers = yield from rpc("fp8plan_prepare", state.expected, state.settings.in_place, MOST_PREPARED)
    state.quantised, state.wide = tuple(answers[0]["quantised"]), frozenset(answers[0]["wide"])


def refuse_leftovers(manifest: Manifest, ranks: Sequence[Sequence[int]]) -> None:
    """Raises ConfigError for a tensor that all ranks together do not load whole.

    vLLM's loaders silently take their part of too large a tensor. ranks: elements of each tensor that a rank loads
    """
    for entry, *loaded in zip(manifest, *ranks, strict=True):
        scales = entry.name.endswith(SCALE_SUFFIX)  # the weights that they belong to are checked
        if sum(loaded) < entry.numel and not scales:
            raise ConfigError(
                f"vLLM's loader does not take {entry.name} of shape {list(entry.shape)} whole: {sum(loaded)} of "
                f"{entry.numel} elements; allowed: the shapes of the model's checkpoint"
            )


def replace_weights(
    state: SyncState,
    source: Any,
    manifest: Any = None,
    kv_amax: Mapping[str, Sequence[float]] | None = None,
    kv_prompts: Sequence[Sequence[int]] | None = None,
    kv_source: str = "calibration prompts",
    scored: Scored | None = None,
    kv_known: Scales | None = None,
) -> Generator[Call, Any, SyncReport]:
    """Send `source` (see manifest_of) and make it serve. The engine answers each Call.

    manifest:   (name, dtype, shape) of every tensor, for a source that is a bare iterator
    kv_amax:    largest |q|, |k|, |v| by layer from the trainer; else measured on `kv_prompts` (token ids)
    kv_source:  where those prompts come from, for the report
    scored:     a sequence that the new weights must score as the trainer has
    kv_known:   KV scales of another replica with these weights, taken over instead of measured

    Raises SyncError; its message says which weights serve.
    """
    seconds: dict[str, float] = {}
    begun = time.perf_counter()
    serving, scales = state.refusal is None, state.kv_scales
    with _timed(seconds, "prepare"):
        try:
            sent = announced(state, source, manifest)
            if isinstance(source, RemoteSource):
                yield from rpc("fp8plan_receive", False)
            if kv_known is None:
                refuse_calibration(state, kv_amax, kv_prompts)
            if scored is not None:
                refuse_scored(state, scored)
            checked = yield from prepared(state, sent)
            pairs: Any = source
            if isinstance(source, Chain):
                pairs = source.patches()
            elif not isinstance(source, RemoteSource):
                pairs = pairs_of(source)
        except ConfigError as error:
            raise SyncError(f"{error}. Nothing was sent; {state.which_serve}") from error
        except LostEngineError as error:  # raised by a trial that could not be undone
            state.note(Event.DIE)
            raise SyncError(f"{error}; {DIED}") from error
    sending = Sending(state, sent, checked, seconds)
    try:
        state.note(Event.BEGIN)
        chain = source if isinstance(source, Chain) else None
        answers = yield from sending.write(pairs, serving=serving, chain=chain)
        state.note(Event.CHECK)
        used = yield from readied(state, kv_amax, kv_prompts, kv_source, kv_known, seconds)
        with _timed(seconds, "score"):
            k3 = None if scored is None else (yield from score(scored))
            state.stamp = sending.stamp or uuid4().hex
            yield from rpc("fp8plan_commit", state.stamp)
            if state.base is not None:
                state.base.commit(state.stamp)
            state.soiled = False
    except BaseException as error:
        yield from _fail(state, error, scales)
    state.note(Event.SERVE)
    state.version += 1
    rounded = [*sending.rounded, *answers[0]["rounded"]]
    if rounded and not state.said_rounded:
        state.said_rounded = True
        warn(rounding(rounded))
    seconds["check"] = max(answer["check"]["seconds"] for answer in answers)
    seconds["total"] = time.perf_counter() - begun
    return finished_report(
        answers,
        version=state.version,
        seconds=seconds,
        kv_scales=state.kv_scales,
        kv_source=used,
        kv_clipped=state.kv_clipped,
        scored_k3=k3,
        patched=sending.patched,
        looked=sending.looked,
        healed=sending.healed,
        residual=0.0 if state.base is None else state.base.residual.relative,
        rounded=len(rounded),
        **sending.counts,
    )


def finished_report(workers: Sequence[Mapping[str, Any]], **more: Any) -> SyncReport:
    """Return the report of a sync. workers: their answers to its end (LiveWeights.finish); more: its other fields"""
    first, checks = workers[0], [worker["check"] for worker in workers]
    names = ("in_place", "reloaded", "why_reloaded", "ignored", "layers")
    return SyncReport(
        **{name: first[name] for name in names},
        checks=[{name: check[name] for name in ("compared", "weight_error", "seconds")} for check in checks],
        compared=sum(check["compared"] for check in checks),
        weight_error=checks[0]["weight_error"],
        **more,
    )


class Sending:
    """One sync's tensors on their way.

    counts:  tensors, bytes and chunks sent
    patched: True once the workers have taken what has changed, and nothing else
    looked:  patches that hold the digests of an unchanged tensor, and no values
    healed:  why patches were refused and all tensors sent; None: they were not
    stamp:   name of the state that a Chain leads to; None: the sync gives one
    rounded: names of tensors that were rounded here, before they were compared with the base
    """

    def __init__(self, state: SyncState, manifest: Manifest, checked: Checked, seconds: dict[str, float]) -> None:
        self._state, self._manifest, self._checked, self._seconds = state, manifest, checked, seconds
        self.counts = {"tensors": 0, "bytes": 0, "chunks": 0}
        self.patched = False
        self.looked = 0
        self.healed: str | None = None
        self.stamp: str | None = None
        self.rounded: list[str] = []
        self._remote: RemoteSource | None = None

    def write(self, pairs: Any, serving: bool, chain: Chain | None = None) -> Sent:
        """Send a trainer's pairs, a RemoteSource or patches of a Chain. Raises ConfigError for what the workers refuse.

        serving: the engine's weights are sound, so that they can be patched
        chain:   the Chain whose patches are sent
        """
        state, base = self._state, self._state.base
        if chain is not None:
            state.base, self.stamp, self.patched = None, chain.stamp, chain.base is not None
            return (yield from self._patch(pairs, ANY if chain.base is None else chain.base))
        if isinstance(pairs, RemoteSource):
            self._remote = pairs
            if state.settings.delta is None:
                state.base = None
                return (yield from self._replace(None))
            tensors = pairs.pairs
            ordered = ((entry.name, tensors[entry.name]) for entry in pairs.manifest)
            pairs = ordered if isinstance(tensors, Mapping) else pairs_of(tensors)
        if state.settings.delta is not None:
            pairs = as_held(pairs, state.wide, self.rounded)
        if base is None or not serving or base.stamp is None or base.manifest != self._manifest:
            state.base = None
            if state.settings.delta is not None:
                settings, fp8, twins = state.settings, state.quantised or (), self._checked.twins
                state.base = Base(self._manifest, state.settings.delta, fp8, settings.top_k, twins, settings.look_every)
                pairs = state.base.recorded(pairs)
            return (yield from self._replace(pairs))
        patches = base.patches(pairs, self._checked.reloaded)
        try:
            answers = yield from self._patch(patches, base.stamp)
            self.patched = True
            return answers
        except ConfigError as error:
            for _ in patches:  # read the rest, so that the base knows all changes
                pass
            if not base.complete:
                raise  # the trainer's tensors are at fault
            self.healed, self.looked = str(error), 0
            yield from rpc("fp8plan_abort", f"patches were refused, and all tensors have not come: {error}")
            return (yield from self._replace(base.pairs()))

    def _patch(self, patches: Iterable[tuple[str, Any]], stamp: str) -> Sent:
        settings, names = self._state.settings, set[str]()

        def named() -> Iterator[tuple[str, Any]]:
            for name, patch in patches:
                names.add(name)
                self.looked += not changed_values(patch)
                yield name, patch

        with _timed(self._seconds, "begin"):
            arguments = self._checked.number, 0, self._state.version, settings.rollback, stamp, settings.look_every
            yield from rpc("fp8plan_begin", *arguments)
        self._state.note(Event.WRITE)
        with _timed(self._seconds, "load"):
            if self._remote is None:
                few = sum(entry.nbytes for entry in self._manifest) // 100
                place = None if self._state.staged_on is None else "cpu"  # where most patches are packed and unpacked
                channel = Channel(place, min(settings.chunk_bytes, few), self._state.workers)
                parts = loose_chunks(named(), self._checked, settings.chunk_bytes)
                self.counts = yield from handed(channel, parts, "fp8plan_patch")
            else:
                most = min(settings.chunk_bytes, self._remote.buffer_bytes)
                self.counts = yield from broadcast(self._remote, loose_chunks(named(), self._checked, most))
        self.counts["tensors"] -= self.looked
        if stamp == ANY and len(names) < len(self._manifest):
            raise ConfigError(f"{len(names)} tensors of {len(self._manifest)} have come")
        with _timed(self._seconds, "finish"):
            return (yield from rpc("fp8plan_finish", len(names)))

    def _replace(self, pairs: Any) -> Sent:
        """Send all tensors. pairs: None for the RemoteSource's own"""
        settings = self._state.settings
        with _timed(self._seconds, "begin"):
            look_every = settings.look_every if self._state.base is not None else 0
            arguments = self._checked.number, settings.samples, self._state.version, settings.rollback
            yield from rpc("fp8plan_begin", *arguments, None, look_every)
        self._state.note(Event.WRITE)
        with _timed(self._seconds, "load"):
            if self._remote is not None:
                self.counts = yield from received(self._remote, self._manifest, pairs)
            else:
                self.counts = yield from streamed(self._state, pairs, self._manifest, self._checked, "fp8plan_load")
        with _timed(self._seconds, "finish"):
            return (yield from rpc("fp8plan_finish", 0))


def streamed(
    state: SyncState, pairs: Iterable[Any], manifest: Manifest, checked: Checked, method: Method
) -> Generator[Call, Any, dict[str, int]]:
    """Send tensors to a method of the workers, by complete groups. Returns counts of tensors, bytes and chunks."""
    whole, settings = sum(entry.nbytes + ALIGNMENT for entry in manifest), state.settings
    channel = Channel(state.staged_on, min(settings.chunk_bytes, whole), state.workers)
    return (yield from handed(channel, chunks(pairs, checked, settings.chunk_bytes), method))


def handed(
    channel: Channel, parts: Iterable[tuple[list[int], list[Any]]], method: Method
) -> Generator[Call, Any, dict[str, int]]:
    """Send chunks of tensors to a method of the workers. Returns counts as `streamed`."""
    with channel:
        for numbers, tensors in parts:
            call = channel.message(method, numbers, tensors)
            yield from rpc(call.method, *call.arguments)
            channel.close()
    return channel.counts


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - begun


def readied(
    state: SyncState,
    amax: Mapping[str, Sequence[float]] | None,
    prompts: Sequence[Sequence[int]] | None,
    source: str,
    known: Scales | None,
    seconds: dict[str, float],
) -> Generator[Call, Any, str | None]:
    """Give checked weights a clean KV cache, KV scales as `kv_scales` does, and an empty prefix cache.

    seconds: gets those of each phase

    Returns where the scales come from.
    """
    with _timed(seconds, "kv_scales"):
        yield from clean(state)
        state.soiled = True  # until the new weights have proven sound
        used = yield from kv_scales(state, amax, prompts, source, known)
    with _timed(seconds, "reset"):
        yield Reset()
    return used


def ended(state: SyncState, why: str) -> Procedure:
    """End the open sync in every worker. The weights from before it serve again where all workers have them."""
    restored = all((yield from rpc("fp8plan_abort", why)))
    state.note(Event.RESTORE if restored else Event.END, why)


def _fail(state: SyncState, error: BaseException, scales: Scales | None) -> Procedure:
    """End a failed sync in every worker.

    Raises SyncError, which says which weights serve now, or the error itself if it is no Exception.
    """
    text = str(error) or type(error).__name__
    why = f"the sync of weights {state.version + 1} failed: {text}"
    if state.base is not None:
        state.base.drop()
    if isinstance(error, LostEngineError):
        state.note(Event.DIE)
    try:
        if not state.dead:
            yield from ended(state, why)
        if state.refusal is None:
            state.kv_scales = scales
            yield Reset()
            yield from clean(state)
    except Exception as second:
        if isinstance(second, LostEngineError):
            state.note(Event.DIE)
        state.note(Event.REFUSE, f"{why}; ending it failed too: {second}")
    if not isinstance(error, Exception):
        raise error
    text = f"{text}; "
    what = "the engine refuses to generate until a complete sync"
    if state.dead:
        what = DIED
        text = "" if isinstance(error, NotServingError) else text
    elif state.refusal is None:
        what = "the old weights serve"
    raise SyncError(f"{text}{what}") from error
