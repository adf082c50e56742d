"""Scales of the FP8 KV cache: what calibration says, after everything that could set them to something else."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tiny_models import (
    CALIBRATION,
    LAYERS,
    LONG_PROMPT,
    PROMPTS,
    Outputs,
    answer,
    checkpoint,
    generate,
    params,
    prompt_logprobs,
    quantised,
    started,
    started_beside_references,
    weights,
)

from fp8plan.errors import ConfigError, SyncError
from fp8plan.model.precision import E4M3_MAX
from fp8plan.runtime.apply.engine.base import AnyEngine
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync.amax import recording_amax
from fp8plan.runtime.apply.weight_sync.calls import Call, Generate
from fp8plan.runtime.apply.weight_sync.fixed_scales import FIXED_SCALES
from fp8plan.runtime.apply.weight_sync.kv_scales import (
    MARGIN,
    PARTS,
    beyond,
    clipped,
    largest,
    scales_from,
)
from fp8plan.runtime.apply.weight_sync.scored import Scored, refuse_scored
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.state import SyncState
from fp8plan.runtime.watch.guard.fallback import GuardSettings

vllm = pytest.mark.vllm
ATTENTION = [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)]
TRAINERS = {layer: (10.0 + n, 500.0, 0.25) for n, layer in enumerate(ATTENTION)}

Scales = dict[str, dict[str, float]]


# --- arithmetic -----------------------------------------------------------------------------------------------------


def test_scales_hold_the_margin_and_nothing_seen_keeps_one() -> None:
    assert scales_from({"a": [448.0, 44.8, 0.0]}) == {"a": [MARGIN, pytest.approx(MARGIN / 10), 1.0]}


@pytest.mark.parametrize("parts", [[1.0, 2.0], [1.0, 2.0, float("nan")], [float("inf"), 1.0, 1.0], [1.0, -1.0, 1.0]])
def test_scales_are_not_made_of_anything_else(parts: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"amax of a is .*; allowed: three finite numbers"):
        scales_from({"a": parts})


def test_ranks_agree_on_the_largest() -> None:
    ranks = [{"a": [1.0, 5.0, 3.0], "b": [0.0, 0.0, 1.0]}, {"a": [2.0, 4.0, 3.0], "b": [1.0, 0.0, 0.0]}]
    assert largest(ranks) == {"a": [2.0, 5.0, 3.0], "b": [1.0, 0.0, 1.0]}


def test_what_clipped_gets_twice_the_room() -> None:
    ones = {"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0]}
    assert clipped({"a": [447.0, 100.0, 0.0], "b": [1.0, 1.0, 1.0]}, ones) == {}
    wider = clipped({"a": [448.0, 896.0, 3.0], "b": [1.0, 1.0, 1.0]}, ones)
    assert wider == {"a": [2.0, 4.0, 1.0]}
    assert clipped({"a": [448.0, 896.0, 3.0]}, wider) == {}


def test_layers_beyond_their_scales_are_those_whose_k_or_v_clips() -> None:
    scales = {"a": [1.0, 1.0, 1.0], "b": [1.0, 2.0, 1.0], "c": [1.0, 1.0, 1.0]}
    amax = {"a": [900.0, 448.0, 1.0], "b": [1.0, 1344.0, 1.0], "c": [1.0, 1.0, 896.0]}
    assert beyond(amax, scales) == {"b": 1.5, "c": 2.0}  # Q stays in BF16, and 448 itself fits


# --- what is checked before anything is sent ------------------------------------------------------------------------


class Generated(AnyEngine):
    """An engine without vLLM, and the prompts that it has run."""

    def __init__(self, fp8_kv: bool = True) -> None:
        launched = SimpleNamespace(fp8_kv=fp8_kv, workers=1)
        super().__init__(launched, SyncSettings(), None, GuardSettings())  # type: ignore[arg-type]
        self.ran: list[Any] = []

    def sizes(self) -> tuple[int, int]:
        raise AssertionError

    def drive(self, procedure: Generator[Call, Any, Any]) -> Any:
        found, seen = None, None
        try:
            while True:
                call = procedure.send(found)
                found = [{"ok": {"a": seen or [0.0] * 3}}]
                if isinstance(call, Generate):
                    tokens = [list(tokens) for tokens in call.prompts]
                    self.ran.append(tokens)
                    seen = [1000.0] * 3 if tokens else None  # clips at a scale of 1.0: a second pass
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("prompts", [([1, n] for n in range(2)), iter([[1, 0], [1, 1]]), [iter([1, 0]), (1, 1)]])
def test_prompts_that_can_be_read_only_once_are_run(prompts: Any) -> None:
    engine = Generated()
    engine.state.kv_scales = {"a": [1.0] * 3}
    assert engine.recalibrate_kv(kv_prompts=prompts) == "calibration prompts"
    assert len(engine.ran) > 1
    assert all(ran == [[1, 0], [1, 1]] for ran in engine.ran)


@pytest.mark.parametrize("prompts", [[], iter([]), (x for x in ())])
def test_no_prompts_are_refused_before_anything_is_done(prompts: Any) -> None:
    engine = Generated()
    with pytest.raises(ConfigError, match="there is nothing to calibrate it with"):
        engine.recalibrate_kv(kv_prompts=prompts)
    assert not engine.ran


@pytest.mark.parametrize("fp8_kv", [False, True])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kv_amax": "x"}, "kv_amax is of type str"),
        ({"kv_amax": [1.0]}, "kv_amax is of type list"),
        ({"kv_prompts": "x"}, "kv_prompts: no list of token ids each"),
        ({"kv_prompts": 5}, "kv_prompts: no list of token ids each"),
        ({"kv_prompts": [[1], 5, [2]]}, "kv_prompts: no list of token ids each"),
    ],
    ids=str,
)
def test_nonsense_is_refused_in_every_precision(given: dict[str, Any], says: str, fp8_kv: bool) -> None:
    with pytest.raises(ConfigError, match=says):
        Generated(fp8_kv).recalibrate_kv(**given)


@pytest.mark.parametrize(
    "scored",
    [Scored([1, 2, 3], ["a", "b"]), Scored([1, 2, 3], None), Scored([1, 2], iter([0.0]))],
    ids=["text", "none", "iterator"],
)
def test_log_probs_that_are_none_are_refused(scored: Any) -> None:
    with pytest.raises(ConfigError, match=r"scored: .*; allowed: Scored\(list of token ids, list of log-probs\)"):
        refuse_scored(SyncState(SyncSettings(), None, fp8_kv=False), scored)


# --- the live engine ------------------------------------------------------------------------------------------------


class Subject(NamedTuple):
    kind: str
    engine: RolloutEngine
    references: dict[str, Outputs]

    def sync(self, which: str, **more: Any) -> Any:
        return self.engine.sync_weights(weights(self.kind, which), **(more or {"kv_prompts": CALIBRATION}))

    def serves(self, which: str) -> bool:
        return self.engine.serving and answer(self.engine, PROMPTS[0]) == self.references[which][0]


CASES = [("dense", "fp8_kv"), ("moe", "fp8_block+fp8_kv")]


@pytest.fixture(scope="module", params=params(CASES, CASES[:1]))
def started_subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with started_beside_references(*request.param) as (engine, references):
        yield Subject(request.param[0], engine, references)


@pytest.fixture
def subject(started_subject: Subject) -> Subject:
    """An engine that serves the weights a, with the scales that calibration gives them."""
    started_subject.sync("a")
    return started_subject


def host_and_device(scales: Scales) -> Scales:
    """The scales, once it is asserted that host and device hold the same."""
    for of_layer in scales.values():
        assert all(of_layer[f"{part}_host"] == pytest.approx(of_layer[part], rel=1e-6) for part in PARTS)
    return {layer: {part: of_layer[part] for part in PARTS} for layer, of_layer in scales.items()}


def assert_live(engine: RolloutEngine, expected: Any) -> None:
    live = host_and_device(engine.kv_scales())
    assert sorted(live) == ATTENTION
    for layer, scales in expected.items():
        assert list(live[layer].values()) == pytest.approx(scales, rel=1e-6)


@vllm
def test_a_sync_sets_what_the_new_weights_need(subject: Subject) -> None:
    reports = [subject.sync(which) for which in "bab"]
    assert reports[0].kv_scales == reports[2].kv_scales != reports[1].kv_scales
    assert_live(subject.engine, reports[2].kv_scales)
    assert generate(subject.engine) == subject.references["b"]  # of an engine that never had other weights


@vllm
def test_calibration_agrees_with_a_trainers_own_forward(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # As verl's prefix grouper does: what stands in the table itself hides what is registered.
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", ALL_ATTENTION_FUNCTIONS["sdpa"])
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint(subject.kind, "a"), dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    with recording_amax(model) as amax, torch.no_grad():
        for prompt in CALIBRATION:
            model(torch.tensor([prompt]))
    ours = subject.sync("a").kv_scales
    theirs = subject.sync("a", kv_amax=amax()).kv_scales
    for layer in ATTENTION:
        assert theirs[layer] == pytest.approx(ours[layer], rel=0.1)  # the weights are quantised here, not there


@vllm
@pytest.mark.parametrize("level", [1, 2])
def test_scales_survive_sleep(subject: Subject, level: int) -> None:
    before = subject.engine.kv_scales()
    subject.engine.sleep(level)  # a CPU only logs that it has none
    subject.engine.llm.collective_rpc("fp8plan_set_kv_scales", args=(dict.fromkeys(ATTENTION, [1.0] * 3),))
    subject.engine.wake_up()
    assert subject.engine.kv_scales() == before
    assert subject.engine.serving == (level == 1)


@vllm
def test_scales_of_the_trainer_are_taken_as_given(subject: Subject) -> None:
    expected = {layer: [MARGIN * value / E4M3_MAX for value in amax] for layer, amax in TRAINERS.items()}
    report = subject.sync("b", kv_amax=TRAINERS)
    assert (report.kv_scales, report.kv_source) == (expected, "trainer")
    assert_live(subject.engine, expected)
    subject.sync("a")
    assert subject.engine.recalibrate_kv(kv_amax=TRAINERS) == "trainer"
    assert_live(subject.engine, expected)


@vllm
def test_a_rollout_is_what_calibration_uses_unless_told(subject: Subject) -> None:
    generate(subject.engine)
    report = subject.sync("a", kv_prompts=None)
    assert report.kv_source == "sequences of the last rollout"
    (request,) = subject.engine.generate([{"prompt_token_ids": LONG_PROMPT}])
    sequence = [*request.prompt_token_ids, *request.outputs[0].token_ids]
    assert subject.sync("a", kv_prompts=None).kv_scales == subject.sync("a", kv_prompts=[sequence]).kv_scales


NO_SCALES = {
    "an unknown layer": ({"kv_amax": {"model.layers.9.self_attn.attn": (1.0, 1.0, 1.0)}}, "model.layers.9"),
    "a layer missing": ({"kv_amax": dict(list(TRAINERS.items())[1:])}, ATTENTION[0]),
    "NaN": ({"kv_amax": TRAINERS | {ATTENTION[1]: (1.0, float("nan"), 1.0)}}, f"amax of {ATTENTION[1]}"),
    "two numbers": ({"kv_amax": TRAINERS | {ATTENTION[1]: (1.0, 1.0)}}, f"amax of {ATTENTION[1]}"),
    "no prompts": ({"kv_prompts": []}, "nothing to calibrate it with"),
    "too long a prompt": ({"kv_prompts": [[1] * 1000]}, "prompt 0 has 1,000 tokens; allowed: 1 to 255, as max"),
    "an empty prompt": ({"kv_prompts": [[1], []]}, "prompt 1 has 0 tokens; allowed: 1 to 255"),
    "one flat prompt": ({"kv_prompts": [1, 2, 3]}, r"kv_prompts: no list of token ids each; allowed: \[\[token ids\]"),
    "text": ({"kv_prompts": ["a prompt"]}, "kv_prompts: no list of token ids each"),
    "vLLM's prompts": ({"kv_prompts": [{"prompt_token_ids": [1]}]}, "kv_prompts: no list of token ids each"),
    "a number": ({"kv_prompts": 7}, "kv_prompts: no list of token ids each"),
    "fractions": ({"kv_prompts": [[1.5]]}, "kv_prompts: prompt 0, token 0 is 1.5; allowed: a whole number, 0 to 1,023"),
    "an unknown token": ({"kv_prompts": [[1, 5000]]}, "prompt 0, token 1 is id 5000; allowed: 0 to 1,023, the model's"),
    "a negative token": ({"kv_prompts": [[-1]]}, "prompt 0, token 0 is id -1; allowed: 0 to 1,023"),
    "an amax of zero": ({"kv_amax": TRAINERS | {ATTENTION[1]: (1.0, 0.0, 1.0)}}, f"{ATTENTION[1]}.*numbers above 0"),
    "a negative amax": ({"kv_amax": TRAINERS | {ATTENTION[1]: (1.0, -1.0, 1.0)}}, f"amax of {ATTENTION[1]}"),
    "an amax beyond float32": ({"kv_amax": TRAINERS | {ATTENTION[1]: (1.0, 1e39, 1.0)}}, f"amax of {ATTENTION[1]}"),
    "an amax for all parts": ({"kv_amax": dict.fromkeys(ATTENTION, 3.0)}, "amax of .* is 3.0; allowed: three finite"),
    "no dict": ({"kv_amax": list(TRAINERS.values())}, "kv_amax is of type list; allowed: a dict"),
    "both": ({"kv_amax": TRAINERS, "kv_prompts": CALIBRATION}, "kv_amax and kv_prompts are both given"),
}


@vllm
@pytest.mark.parametrize("fault", NO_SCALES)
def test_a_sync_that_scales_cannot_be_made_for_is_refused_before_it_begins(subject: Subject, fault: str) -> None:
    given, says = NO_SCALES[fault]
    with pytest.raises(SyncError, match=f"{says}.*Nothing was sent; the old weights serve"):
        subject.sync("b", **given)
    assert subject.serves("a")
    assert_no_recorder(subject.engine)
    subject.sync("b")
    assert subject.serves("b")


@vllm
@pytest.mark.parametrize("fault", NO_SCALES)
def test_a_recalibration_that_fails_leaves_the_scales_of_before(subject: Subject, fault: str) -> None:
    before = subject.engine.kv_scales()
    given, says = NO_SCALES[fault]
    with pytest.raises(ConfigError, match=says):
        subject.engine.recalibrate_kv(**given)
    assert_no_recorder(subject.engine)
    assert subject.engine.serving
    assert subject.engine.kv_scales() == before


@vllm
@pytest.mark.parametrize("given", [{"kv_prompts": CALIBRATION}, {"kv_amax": TRAINERS}], ids=["prompts", "amax"])
def test_scales_do_not_change_under_a_running_request(subject: Subject, given: dict[str, Any]) -> None:
    from vllm import SamplingParams

    before = subject.engine.kv_scales()
    core = subject.engine.llm.llm_engine
    core.add_request("8", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2, ignore_eos=True))
    try:
        with pytest.raises(SyncError, match="1 requests are running"):
            subject.engine.recalibrate_kv(**given)
        assert subject.engine.kv_scales() == before
    finally:
        core.abort_request(["8"])


@vllm
def test_calibration_leaves_no_wrapper_behind(subject: Subject) -> None:
    subject.engine.recalibrate_kv(kv_prompts=CALIBRATION)
    assert_no_recorder(subject.engine)


def assert_no_recorder(engine: RolloutEngine) -> None:
    def wrapped(model: Any) -> list[str]:
        return [name for name, layer in model.named_modules() if "forward" in vars(getattr(layer, "impl", object))]

    assert engine.llm.apply_model(wrapped) == [[]]


@vllm
def test_scales_survive_a_raw_reload_by_recalibration(subject: Subject) -> None:
    before = subject.engine.kv_scales()
    reload(subject.engine, weights(subject.kind, "a"))
    assert {value for layer in subject.engine.kv_scales().values() for value in layer.values()} == {1.0}
    assert subject.engine.recalibrate_kv(kv_prompts=CALIBRATION) == "calibration prompts"
    assert subject.engine.kv_scales() == before
    assert generate(subject.engine, cold=True) == subject.references["a"]


def reload(engine: RolloutEngine, tensors: dict[str, Any]) -> None:
    """vLLM's own reload, past this engine."""
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})


@vllm
def test_a_sync_after_a_raw_reload_serves_what_was_sent(subject: Subject) -> None:
    reload(subject.engine, weights(subject.kind, "a"))
    for which in "ba":
        subject.sync(which)
        assert generate(subject.engine) == subject.references[which]


@vllm
@pytest.mark.parametrize("fault", ["the stream", "the scored sequence"])
def test_a_copy_that_comes_back_comes_with_its_scales(fault: str) -> None:
    with started("dense", "a", "fp8_block+fp8_kv", rollback="cpu") as engine:
        before, said = engine.kv_scales(), generate(engine)
        sent = weights("dense", "b")
        scored = Scored([1, 2, 3], [-50.0, -50.0]) if fault == "the scored sequence" else None
        if scored is None:
            sent["model.norm.weight"][3] = float("nan")
        with pytest.raises(SyncError, match="the old weights serve"):
            engine.sync_weights(sent, kv_prompts=CALIBRATION, scored=scored)
        assert engine.kv_scales() == before
        assert generate(engine, cold=True) == said
        engine.wake_up()  # sets the scales that the engine remembers
        assert engine.kv_scales() == before


@vllm
def test_finding_out_what_is_quantised_leaves_the_scales() -> None:
    with started("dense", "a", "fp8_block+fp8_kv", weights_in="fp8_block") as engine:
        before = host_and_device(engine.kv_scales())
        with pytest.raises(SyncError, match="the old weights serve"):
            engine.sync_weights(quantised(weights("dense", "b"), ["model.layers.0.mlp.up_proj.weight"]))
        assert engine.serving
        assert host_and_device(engine.kv_scales()) == before


# --- what calibration is for ----------------------------------------------------------------------------------------

# K of these rotary pairs is this many times larger and Q as much smaller: the exact model says the same, but K exceeds
# 448 in 16 of its 64 dimensions by up to 19 times.
PAIRS, FACTOR = 8, 2048.0
HALF = 32  # of head_dim: rotary pairs are (d, d + 32)


def with_outliers(tensors: dict[str, Any]) -> dict[str, Any]:
    for name, tensor in tensors.items():
        factor = FACTOR if "k_norm" in name else 1 / FACTOR if "q_norm" in name else 1.0
        if factor != 1.0:
            for start in (0, HALF):
                tensor[start : start + PAIRS] *= factor
    return tensors


class Exact(NamedTuple):
    logprobs: list[float]
    amax: dict[str, list[float]]


@pytest.fixture(scope="module")
def exact() -> Exact:
    """The log-probs of a BF16 KV cache, and the largest |q|, |k| and |v| that it sees."""
    with started("dense", "a", "bf16") as engine:
        engine.sync_weights(with_outliers(weights("dense", "a")))
        engine.llm.collective_rpc("fp8plan_record_amax", args=(True,))
        logprobs = prompt_logprobs(engine, LONG_PROMPT)
        (answer,) = engine.llm.collective_rpc("fp8plan_record_amax", args=(False,))
        return Exact(logprobs, answer["ok"])


@vllm
def test_outliers_of_k_are_wrong_with_scale_one_and_right_when_calibrated(exact: Exact) -> None:
    assert min(amax[1] for amax in exact.amax.values()) > 10 * E4M3_MAX
    with started("dense", "a", "fp8_kv") as engine:
        report = engine.sync_weights(with_outliers(weights("dense", "a")), kv_prompts=[LONG_PROMPT])
        calibrated = prompt_logprobs(engine, LONG_PROMPT)
        engine.recalibrate_kv(kv_amax=dict.fromkeys(ATTENTION, [E4M3_MAX / MARGIN] * 3))
        assert_live(engine, dict.fromkeys(ATTENTION, [1.0] * 3))
        clipping = prompt_logprobs(engine, LONG_PROMPT)
    # Measured: 0.097 nats a token, as without outliers (0.098: E4M3's own rounding of K and V), against 0.587.
    assert difference(calibrated, exact.logprobs) < 0.15
    assert difference(clipping, exact.logprobs) > 0.4
    # Calibration ran until it clipped nothing: what it found is what BF16 sees (measured: at most 3 % apart).
    for layer, amax in exact.amax.items():
        assert [scale * E4M3_MAX / MARGIN for scale in report.kv_scales[layer]] == pytest.approx(amax, rel=0.06)


def difference(one: list[float], other: list[float]) -> float:
    """Mean |difference| of log-probs, in nats per token."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


@vllm
def test_fixed_scales_stay_and_the_layers_that_they_clip_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = (*FIXED_SCALES, "CPUAttentionBackendImpl")  # a CPU has no FlashInfer
    monkeypatch.setattr("fp8plan.runtime.apply.weight_sync.fixed_scales.FIXED_SCALES", kept)
    tensors = weights("dense", "a")
    name = next(name for name in tensors if name.endswith("layers.0.self_attn.v_proj.weight"))
    with started("dense", "a", "fp8_kv") as engine:
        assert engine.state.kv_fixed
        report = engine.sync_weights(tensors, kv_prompts=CALIBRATION)
        assert (report.kv_source, report.kv_clipped) == ("the engine's start", {})
        with pytest.warns(RuntimeWarning, match=f"fixed KV scales clip 1 layer.*{ATTENTION[0]} has"):
            report = engine.sync_weights(tensors | {name: tensors[name] * 1e5}, kv_prompts=CALIBRATION)
        assert list(report.kv_clipped) == [ATTENTION[0]]
        assert set(report.kv_scales[ATTENTION[0]]) == {1.0}
        generate(engine)
        assert engine.observation is not None
        assert engine.observation.kv_clipped == (ATTENTION[0],)
        assert engine.sync_weights(tensors, kv_prompts=CALIBRATION).kv_clipped == {}
