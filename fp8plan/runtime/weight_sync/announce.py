"""The check of what a sync will send, before any byte: here, and by a dry run in every worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.weight_sync import manifest as manifests
from fp8plan.runtime.weight_sync.manifest import Manifest
from fp8plan.runtime.weight_sync.state import Call, Checked, SyncState, rpc

# Manifests that workers remember; a trainer sends one and the same every step, or few.
MOST_PREPARED = 4


def announced(state: SyncState, source: Any, manifest: Any) -> Manifest:
    """Return the manifest of what will be sent. Raises ConfigError for what is wrong without asking the engine."""
    found = manifests.manifest_of(source)
    if manifest is not None:
        found = manifests.read_manifest(manifest)
    expected = state.expected
    if expected is not None and state.settings.weights_in == "fp8_block":
        expected = manifests.quantised_manifest(expected, state.quantised)
    if found is None:
        found = expected
    if found is None:
        raise ConfigError(
            "an iterator does not say what it will send, and the engine has no checkpoint to compare with; allowed: "
            "manifest=[(name, dtype, shape), ...] with it, or a dict, a list of pairs, or vLLM's WeightSource"
        )
    if (found, state.settings.in_place) not in state.prepared:
        manifests.refuse(found, expected, state.settings.weights_in)
    return found


def prepared(state: SyncState, manifest: Manifest) -> Generator[Call, Any, Checked]:
    """Let the workers check a manifest. They are asked once for each, and remember the last MOST_PREPARED."""
    key = (manifest, state.settings.in_place)
    if key not in state.prepared:
        if len(state.prepared) == MOST_PREPARED:
            state.prepared.pop(next(iter(state.prepared)))
        used = {checked.number for checked in state.prepared.values()}
        number = next(number for number in range(MOST_PREPARED) if number not in used)
        wide = manifests.stored_wide(state.expected)
        answers = yield from rpc("fp8plan_prepare", plain(manifest), state.settings.in_place, number, wide)
        groups = answers[0]["groups"]
        refuse_leftovers(manifest, [answer["taken"] for answer in answers])
        numbers = {entry.name: number for number, entry in enumerate(manifest)}
        state.prepared[key] = Checked(number, groups, Counter(groups), numbers)
    return state.prepared[key]


def refuse_leftovers(manifest: Manifest, ranks: Sequence[Sequence[int]]) -> None:
    """Raises ConfigError for a tensor that all ranks together do not load whole. vLLM's loaders take their part of a
    tensor that is too large without a word."""
    for entry, *taken in zip(manifest, *ranks, strict=True):
        scales = entry.name.endswith(manifests.SCALE_SUFFIX)  # one for many elements: their weight is looked at
        if sum(taken) < entry.numel and not scales:
            raise ConfigError(
                f"vLLM's loader does not take {entry.name} of shape {list(entry.shape)} whole: {sum(taken)} of "
                f"{entry.numel} elements; allowed: the shapes of the model's checkpoint"
            )


def plain(manifest: Manifest) -> list[list[Any]]:
    """Return a manifest as plain data, which vLLM can send to another process."""
    return [[name, dtype, list(shape)] for name, dtype, shape in manifest]
