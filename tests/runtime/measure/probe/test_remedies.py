"""Remedies in a probe: trainers in FP8, router replay and layers in BF16 score the samples of one engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_models import checkpoint, experts_or_skip, forget_groups

from benchmarks.gpu.remedies import remedies_of
from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.risk.remedies import NO_REMEDIES, Remedies
from fp8plan.runtime.measure.probe import probe as probe_module
from fp8plan.runtime.measure.probe.probe import Probe, compared, probe
from fp8plan.runtime.measure.probe.reference import Reference
from fp8plan.runtime.measure.probe.results import Interval, Probed, in_effect
from fp8plan.runtime.measure.probe.sampling import Sampled, SampleSettings
from fp8plan.runtime.replay import RULES, replayed
from fp8plan.views.findings import probe_report
from tools.observations import append, observations
from tools.risk_report import read_observations

torch = pytest.importorskip("torch")

LIMITS = EngineLimits(
    max_num_seqs=32, max_num_batched_tokens=2048, block_size=128, num_gpu_blocks=128, enforce_eager=True
)
SETTINGS = SampleSettings(max_tokens=32, samples=2)
PROMPTS = [[(37 * row + 11 * place) % 1000 for place in range(12)] for row in range(16)]
TRAINERS = {name: Remedies(trainer_precision=name) for name in ("bf16", "fp8_block", "fp8_block_pow2")}


@pytest.fixture(scope="module")
def measured() -> Probe:
    """An engine with FP8 weights, against each trainer with and without replay."""
    forget_groups()
    torch.set_num_threads(1)
    remedies = [replace(trainer, router_replay=replay) for trainer in TRAINERS.values() for replay in (False, True)]
    with experts_or_skip():
        found = probe(
            str(checkpoint("moe", "a")), ["fp8_block"], PROMPTS, gpu="cpu", remedies=remedies, settings=SETTINGS,
            limits=LIMITS,
        )  # fmt: skip
        for probed in found.findings:
            if probed.error is not None:
                raise ValueError(probed.error)
    return found


@pytest.mark.vllm
def test_a_trainer_on_the_grid_of_the_engine_has_less_mismatch(measured: Probe) -> None:
    """The engine's scales are FP32, so a trainer with powers of two is on another grid."""
    kls = {name: measured.interval_of("fp8_block", remedies) for name, remedies in TRAINERS.items()}
    assert kls["fp8_block"].high < kls["bf16"].low / 2
    assert kls["fp8_block"].high < kls["fp8_block_pow2"].low / 2
    assert len({probed.tokens for probed in measured.findings}) == 1
    assert measured.precisions["fp8_block"].remedies == NO_REMEDIES
    assert measured.interval_of("bf16") is None


@pytest.mark.vllm
def test_rows_for_the_fit_have_their_trainer(measured: Probe, tmp_path: Path) -> None:
    table = tmp_path / "observations.csv"
    append(table, observations(measured.to_dict()))
    read = [(row.setting.trainer, row.setting.router_replay) for row in read_observations(table)]
    assert read == [(name, replay) for name in TRAINERS for replay in (False, True)]
    kept = replace(measured, findings=[replace(measured.findings[0], remedies=Remedies(keep_bf16=(1, 1)))])
    assert observations(kept.to_dict()) == []  # the table has no column for them


@pytest.mark.vllm
def test_replayed_experts_of_the_engine_lower_the_mismatch_of_each_trainer(measured: Probe) -> None:
    for trainer in TRAINERS.values():
        replayed = measured.interval_of("fp8_block", replace(trainer, router_replay=True))
        assert replayed.high < measured.interval_of("fp8_block", trainer).low / 1.5
    differ = {probed.remedies: probed.experts_differ for probed in measured.findings}
    matched, apart = TRAINERS["fp8_block"], TRAINERS["fp8_block_pow2"]
    assert 0 < differ[matched] < differ[NO_REMEDIES] < differ[apart] < 1


def moe_samples(reference: Reference, trainer: str) -> list[Sampled]:
    """Samples of a stand-in for an engine: a model whose linears compute in `trainer`, with its log-probs and experts.

    Their tokens are random, so that each comes from its prompt alone.
    """
    chance = torch.Generator().manual_seed(0)
    drawn = [torch.randint(1024, (24,), generator=chance).tolist() for _ in PROMPTS]
    rows = [Sampled(prompt, response, []) for prompt, response in zip(PROMPTS, drawn, strict=True)]
    with reference.computing_in(trainer, []):
        logprobs = reference.score(rows).logprobs
        samples = []
        for row, values in zip(rows, logprobs, strict=True):
            with replayed(reference._body, None) as seen, torch.inference_mode():
                reference._body(input_ids=torch.tensor([[*row.prompt, *row.response]]))
            samples.append(row._replace(logprobs=values.tolist(), experts=seen.own_choice[:-1].numpy()))
    return samples


def kl(reference: Reference, samples: list[Sampled], **how: Any) -> Interval:
    return compared(reference.score(samples, **how).logprobs, [row.logprobs for row in samples]).kl_k3


def test_router_replay_lowers_the_mismatch_of_experts() -> None:
    reference = Reference(str(checkpoint("moe", "a")))
    samples = moe_samples(reference, "fp8_block")
    plain, replayed = kl(reference, samples), kl(reference, samples, router_replay=True)
    assert replayed.high < plain.low
    assert 0.05 < reference.score(samples).experts_differ < 0.95


def test_an_engine_that_computes_like_the_trainer_picks_the_same_experts() -> None:
    reference = Reference(str(checkpoint("moe", "a")))
    samples = moe_samples(reference, "bf16")
    for replay in (False, True):  # rows are scored alone, as their routes were recorded
        scores = reference.score(samples, tokens_at_once=1, router_replay=replay)
        assert scores.experts_differ == 0
        for row, values in zip(samples, scores.logprobs, strict=True):
            assert values.tolist() == pytest.approx(row.logprobs, abs=0.05)
    other = [row._replace(experts=(row.experts + 1) % 8) for row in samples]
    assert reference.score(other).experts_differ == pytest.approx(1.0, abs=0.05)


def test_samples_without_experts_cannot_be_replayed() -> None:
    reference = Reference(str(checkpoint("moe", "a")))
    rows = [Sampled(PROMPTS[0], [1, 2], [0.0, 0.0])]
    with pytest.raises(ConfigError, match="the samples have no experts of the engine to replay"):
        reference.score(rows, router_replay=True)
    assert reference.score(rows).experts_differ is None


def test_a_reference_with_unknown_routers_is_scored_without_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = moe_samples(Reference(str(checkpoint("moe", "a"))), "bf16")
    monkeypatch.delitem(RULES, "Qwen3MoeTopKRouter")
    reference = Reference(str(checkpoint("moe", "a")))
    scores = reference.score(samples)
    assert scores.experts_differ is None
    assert [len(row) for row in scores.logprobs] == [len(row.response) for row in samples]
    with pytest.raises(ConfigError, match="has no router that can be replayed"):
        reference.score(samples, router_replay=True)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of each engine that a probe starts, in whose place the reference samples."""
    reference = Reference(str(checkpoint("moe", "a")))
    samples, started = moe_samples(reference, "fp8_block"), []

    def sample(setup: Any, *_: Any) -> Any:
        routed_experts = setup.limits.enable_return_routed_experts
        started.append((setup.precision.name, setup.remedies.keep_bf16, routed_experts))
        return [row if routed_experts else row._replace(experts=None) for row in samples], {}

    monkeypatch.setattr(probe_module, "sample", sample)
    return started


ALL = remedies_of(experts=True)


@pytest.mark.vllm
def test_one_engine_samples_for_all_trainers(engines: list[tuple[Any, ...]]) -> None:
    found = probe(str(checkpoint("moe", "a")), ["bf16", "fp8_block"], PROMPTS, gpu="cpu", remedies=ALL, limits=LIMITS)
    kept = ((0, 0), (1, 1), (1, 1, "o_proj"))
    assert engines == [("bf16", (0, 0), True), *(("fp8_block", each, True) for each in kept)]
    assert [probed.error for probed in found.findings] == [None] * len(found.findings)
    assert [probed.remedies for probed in found.findings if probed.precision == "fp8_block"] == ALL
    bf16 = [probed.remedies for probed in found.findings if probed.precision == "bf16"]
    assert bf16 == [each for each in ALL if each.trainer_precision == "fp8_block" or each.keep_bf16 == (0, 0)]
    kls = {probed.remedies: probed.kl_k3.value for probed in found.findings if probed.precision == "fp8_block"}
    matched, apart = Remedies(trainer_precision="fp8_block"), Remedies(trainer_precision="fp8_block", keep_bf16=(1, 1))
    assert kls[matched] == pytest.approx(0, abs=1e-3)  # the stand-in is this trainer
    assert kls[matched] < kls[replace(NO_REMEDIES, router_replay=True)] < kls[NO_REMEDIES]
    assert kls[matched] < kls[apart]  # its first and last layer are in BF16, the stand-in's are not
    assert found.interval_of("bf16", replace(NO_REMEDIES, keep_bf16=(1, 1))) == found.interval_of("bf16")


@pytest.mark.vllm
def test_the_table_and_json_name_the_remedies(engines: list[tuple[Any, ...]]) -> None:
    found = probe(str(checkpoint("moe", "a")), ["fp8_block"], PROMPTS, gpu="cpu", remedies=ALL, limits=LIMITS)
    assert engines[-1][1] == (1, 1, "o_proj")
    console = Console(width=240)
    with console.capture() as shown:
        console.print(probe_report(found))
    lines = [line.split() for line in shown.get().splitlines() if line.startswith("fp8_block ")]
    assert [line[1:4] for line in lines] == [
        [each.trainer_precision, "yes" if each.router_replay else "no", ",".join(map(str, each.keep_bf16))]
        for each in ALL
    ]
    assert "other experts" in shown.get()
    rows = json.loads(json.dumps(found.to_dict(), allow_nan=False))["precisions"]
    assert [Remedies(**row["remedies"]) for row in rows] == ALL
    assert all(0 <= row["experts_differ"] <= 1 for row in rows)


@pytest.mark.vllm
def test_a_probe_without_remedies_asks_for_no_experts(engines: list[tuple[Any, ...]]) -> None:
    found = probe(str(checkpoint("moe", "a")), ["fp8_block"], PROMPTS, gpu="cpu", limits=LIMITS)
    assert engines == [("fp8_block", (0, 0), False)]
    [probed] = found.findings
    assert (probed.remedies, probed.experts_differ) == (NO_REMEDIES, None)
    console = Console(width=240)
    with console.capture() as shown:
        console.print(probe_report(found))
    assert not {"trainer", "replay", "kept", "other"} & set(shown.get().partition("KL k3")[0].split())


@pytest.mark.vllm
def test_replay_without_experts_is_refused_before_an_engine_starts(engines: list[tuple[Any, ...]]) -> None:
    with pytest.raises(ConfigError, match=r"router_replay is given, and .* has no experts"):
        probe(str(checkpoint("dense", "a")), ["bf16"], PROMPTS, gpu="cpu", remedies=Remedies(router_replay=True))
    assert engines == []


@pytest.mark.vllm
def test_kept_layers_without_fp8_are_refused_before_an_engine_starts(engines: list[tuple[Any, ...]]) -> None:
    kept = [NO_REMEDIES, Remedies(keep_bf16=(1, 1))]
    with pytest.raises(ConfigError, match=r"keep_bf16 is \(1, 1\), and no precision of the probe has FP8 weights"):
        probe(str(checkpoint("dense", "a")), ["bf16", "fp8_kv"], PROMPTS, gpu="cpu", remedies=kept)
    assert engines == []


def test_layers_are_kept_only_beside_linears_in_fp8() -> None:
    kept = Remedies(keep_bf16=(1, 1))
    assert in_effect(kept, "fp8_block+fp8_kv") == kept
    assert in_effect(kept, "fp8_kv") == in_effect(kept, "bf16") == NO_REMEDIES
    both = Remedies(trainer_precision="fp8_block", keep_bf16=(1, 1))
    assert in_effect(both, "bf16") == both


def test_an_interval_is_that_of_the_remedies_that_run() -> None:
    replay = Remedies(router_replay=True)
    findings = [
        Probed("fp8_block", figures={"kl_k3": Interval(2e-2, 1e-2, 3e-2)}),
        Probed("fp8_block", figures={"kl_k3": Interval(2e-3, 1e-3, 3e-3)}, remedies=replay),
        Probed("fp8_kv", error="RuntimeError"),
    ]
    found = Probe("a model", "cpu", "today", "0.33.0", "a test", SampleSettings(), 16, findings)
    assert found.interval_of("fp8_block") == found.interval_of("fp8_block", NO_REMEDIES) == Interval(2e-2, 1e-2, 3e-2)
    assert found.interval_of("fp8_block", replay) == Interval(2e-3, 1e-3, 3e-3)
    others = [
        ("fp8_kv", NO_REMEDIES),
        ("bf16", NO_REMEDIES),
        (None, NO_REMEDIES),
        ("fp8_block", Remedies(trainer_precision="fp8_block")),
    ]
    assert [found.interval_of(*other) for other in others] == [None] * 4
