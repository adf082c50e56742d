"""After a sync, tokens and log-probs equal those of an engine freshly started on the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from fp8plan.model.precision import PRESETS, precision
from fp8plan.runtime.engine import RolloutEngine
from fp8plan.runtime.manifest import manifest_of
from fp8plan.runtime.weight_sync import SyncReport
from tiny_models import (
    BLOCK_SIZE,
    CALIBRATION,
    EXPERTS,
    KINDS,
    LAYERS,
    LONG_PROMPT,
    Outputs,
    generate,
    quantised,
    started_beside_references,
    weights,
)

pytestmark = pytest.mark.vllm

# Modules with weights: an embedding, a head and a last norm; in each layer qkv, o, two norms beside it and two inside
# attention, and then gate_up and down, or a router and its experts.
MODULES = 3 + LAYERS * 8
QUANTISED = {"dense": LAYERS * 4, "tied": LAYERS * 4, "ragged": LAYERS * 4, "moe": LAYERS * 3}


class Case(NamedTuple):
    kind: str
    precision: str
    engine: RolloutEngine
    references: dict[str, Outputs]


CASES = [(kind, name) for kind in KINDS for name in PRESETS] + [("ragged", "fp8_block")]


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with started_beside_references(*request.param) as (engine, references):
        yield Case(*request.param, engine, references)


def test_five_syncs_alternate_between_two_sets_of_weights(case: Case) -> None:
    assert case.references["a"] != case.references["b"]
    for version, which in enumerate("babab", 1):
        report = case.engine.sync_weights(weights(case.kind, which), kv_prompts=CALIBRATION)
        assert generate(case.engine) == case.references[which]
        assert report.version == version
        assert_reported(report, case)


def assert_reported(report: SyncReport, case: Case) -> None:
    sent = weights(case.kind, "a")
    assert (report.tensors, report.bytes) == (len(sent), sum(tensor.nbytes for tensor in sent.values()))
    assert report.compared > 0
    assert set(report.seconds) == {"prepare", "begin", "load", "finish", "kv_scales", "reset", "score", "total"}
    assert report.in_place + report.reloaded == sum(report.layers.values())
    chosen = precision(case.precision)
    fp8_modules = QUANTISED[case.kind] if chosen.weights == "fp8_block" else 0
    assert report.layers.get("float8_e4m3fn", 0) == fp8_modules
    if fp8_modules:
        assert report.weight_error == pytest.approx(0.0265, abs=0.0015)  # E4M3 by block; 3.7 % were E8M0
    else:
        assert report.weight_error is None
    assert (report.kv_scales is not None) == (chosen.kv == "fp8")
    assert report.kv_source == ("calibration prompts" if chosen.kv == "fp8" else None)


def test_facts_name_the_kernels_and_the_router_stays_bf16(case: Case) -> None:
    layers = case.engine.facts["layers"]
    fp8 = {kind: count for kind, count in layers.items() if "Fp8" in kind}
    assert sum(fp8.values()) == (QUANTISED[case.kind] if precision(case.precision).weights == "fp8_block" else 0)
    if case.kind == "moe":
        router = [kind for kind in layers if kind.startswith("ReplicatedLinear")]
        assert [(kind.split(" / ")[1], layers[kind]) for kind in router] == [("UnquantizedLinearMethod", LAYERS)]
    assert case.engine.facts["kv_cache_dtype"].startswith("fp8") == (precision(case.precision).kv == "fp8")
