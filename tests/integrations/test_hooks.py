"""The hooks, called as slime, prime-rl and SkyRL call: the result is fp8plan's own correction, and thresholds move."""

from __future__ import annotations

import inspect
import json
import pickle
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import frameworks
import plans
import pytest
import torch
from hook_batches import (
    ARGS,
    CALM,
    LENGTHS,
    WILD,
    both,
    megatron,
    optimiser_steps,
    padded,
    responses,
    sequences,
    settings_file,
    slime_batch,
)

from fp8plan import schemas
from fp8plan.errors import ConfigError
from fp8plan.integrations import hooks as micro_batches
from fp8plan.integrations import prime_rl, skyrl, slime
from fp8plan.integrations.hooks import HookSettings, MicroBatches
from fp8plan.runtime.watch.correction.correct import Correction, CorrectionSettings, Thresholds, correct
from fp8plan.runtime.watch.mismatch.measure import pack
from fp8plan.runtime.watch.mismatch.sampling import Sampling
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.steps import RunReader

FIRST = CorrectionSettings(thresholds=Thresholds(4.0))  # the default law begins so


def expected(seed: int, sigma: float, settings: CorrectionSettings = FIRST) -> Correction:
    """fp8plan's own correction of the same tensors, packed."""
    train, rollout, masks = (torch.cat(x) for x in responses(seed, sigma))
    return correct(pack(train, rollout, masks, LENGTHS), settings)


BAND = CorrectionSettings("sequence", "mis", Thresholds(None, (0.5, 2.0)))


def test_slime_gets_fp8plans_weights() -> None:
    pg_loss, batch = slime_batch(0, WILD)
    loss, masks, figures = frameworks.slime_call(slime.correct, ARGS, pg_loss, batch)
    own = expected(0, WILD)
    assert torch.equal(loss, pg_loss * own.weights)
    assert torch.equal(torch.cat(masks), own.mask)
    assert [x.dtype for x in masks] == [x.dtype for x in batch["loss_masks"]]
    assert [len(x) for x in masks] == LENGTHS
    assert all(x.shape == pg_loss.shape and not x.requires_grad for x in figures.values())
    assert float(figures["fp8plan/threshold_tis"].unique()) == 4.0
    ratio = (torch.cat(batch["log_probs"]) - torch.cat(batch["rollout_log_probs"])).double()
    assert torch.allclose(figures["fp8plan/k3"].double(), ratio.exp() - 1 - ratio, atol=1e-6)
    loss.sum().backward()
    assert torch.equal(pg_loss.grad, own.weights)


def test_slime_gets_masks_of_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = settings_file(tmp_path, level="sequence", mode="mis", thresholds="constant")
    monkeypatch.setenv("FP8PLAN_MONITOR", path)
    pg_loss, batch = slime_batch(0, 0.2)
    loss, masks, figures = frameworks.slime_call(slime.correct, ARGS, pg_loss, batch)
    own = expected(0, 0.2, BAND)
    assert 0 < own.kept_sequences < 1
    assert torch.equal(loss, pg_loss * own.weights)
    assert torch.equal(torch.cat(masks), own.mask)
    lost = figures["fp8plan/lost_tokens"] * torch.cat(batch["loss_masks"])
    assert float(lost.sum() / torch.cat(batch["loss_masks"]).sum()) == pytest.approx(1 - own.kept_tokens)


def test_slime_without_tis_gets_figures_only() -> None:
    pg_loss, batch = slime_batch(0, WILD)
    args = SimpleNamespace(use_tis=False)
    loss, masks, figures = frameworks.slime_call(slime.correct, args, pg_loss, batch)
    assert loss is pg_loss
    assert masks is batch["loss_masks"]
    assert torch.equal(figures["fp8plan/weight"], expected(0, WILD).weights)


def test_a_context_parallel_rank_of_slime_gets_its_parts_of_whole_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, each with one half of every response. Sequence-level weights need both halves."""
    pg_loss, batch = slime_batch(0, 0.1)
    halves: dict[str, Any] = dict(batch)
    back: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name in ("log_probs", "rollout_log_probs"):
        halves[name] = [x[: len(x) // 2].clone() for x in batch[name]]
        back += list(zip(halves[name], batch[name], strict=True))

    def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
        found = next(x for half, x in back if half is tensor)
        assert len(found) == response_length == total_length - 5
        return found

    def slice_log_prob_with_cp(log_prob: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
        assert len(log_prob) == response_length == total_length - 5
        return log_prob[: response_length // 2]

    frameworks.install(
        monkeypatch, "slime.backends.megatron_utils.cp_utils",
        all_gather_with_cp=all_gather_with_cp, slice_log_prob_with_cp=slice_log_prob_with_cp,
    )  # fmt: skip
    megatron(monkeypatch, cp=2)
    monkeypatch.setenv("FP8PLAN_MONITOR", settings_file(tmp_path, level="sequence", thresholds="constant"))
    own = torch.cat([x[: len(x) // 2] for x in pg_loss.detach().split(LENGTHS)])
    loss, masks, figures = frameworks.slime_call(slime.correct, ARGS, own, halves)
    weights = expected(0, 0.1, CorrectionSettings("sequence")).weights
    assert torch.equal(loss, own * torch.cat([x[: len(x) // 2] for x in weights.split(LENGTHS)]))
    assert [len(x) for x in masks] == LENGTHS  # slime slices masks itself
    assert all(x.shape == own.shape for x in figures.values())


@pytest.mark.parametrize("weighted", [False, True])
def test_prime_rl_gets_the_weighted_policy_gradient(weighted: bool) -> None:
    given = sequences(0, WILD, weighted)
    loss, figures = frameworks.prime_rl_step(prime_rl.loss, {}, given)
    own = expected(0, WILD)
    advantages = torch.cat([x.advantages * (1.0 if x.loss_weights is None else x.loss_weights) for x in given])
    train = torch.cat([x.trainer_logprobs for x in given])
    by_hand = -(own.weights * advantages * train * own.mask).sum() / own.mask.sum()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-5)
    assert set(figures) == {"fp8plan/clip_fraction", "fp8plan/lost_tokens", "fp8plan/threshold_tis"}
    assert figures["fp8plan/threshold_tis"].tolist() == [4.0] * len(given)
    loss.backward()
    slope = torch.cat([x.trainer_logprobs.grad for x in given])
    assert torch.allclose(slope, -own.weights * advantages * own.mask / own.mask.sum(), rtol=1e-5)


def test_prime_rl_masks_tokens_and_counts_no_empty_sequence(tmp_path: Path) -> None:
    path = settings_file(tmp_path, mode="icepop", band=[0.8, 1.25], thresholds="constant")
    given = sequences(0, WILD)
    given[1].loss_mask[:] = False
    loss, figures = frameworks.prime_rl_step(prime_rl.loss, {"settings": path}, given)
    assert all(x.shape == (len(given) - 1,) for x in figures.values())
    loss.backward()
    for inputs in given:
        ratio = (inputs.trainer_logprobs.detach() - inputs.inference_logprobs).exp()
        cut = ~inputs.loss_mask | (ratio < 0.8) | (ratio > 1.25)
        assert torch.equal(inputs.trainer_logprobs.grad == 0, cut)


@pytest.mark.parametrize("base", ["regular", "dual_clip"])
def test_skyrl_gets_its_own_loss_with_weights(base: str) -> None:
    skyrl.register()
    registered = frameworks.PolicyLossRegistry.get(f"fp8plan_{base}")
    sent = pickle.loads(pickle.dumps(registered))  # to Ray's processes
    config, batch = frameworks.algorithm_config(f"fp8plan_{base}"), padded(0, WILD)
    loss, figures = frameworks.skyrl_call(sent, config, batch)
    assert config.policy_loss_type == f"fp8plan_{base}"  # SkyRL's own is not changed
    own = correct(pack(batch["old_action_log_probs"], batch["rollout_action_logprobs"], batch["loss_mask"]), FIRST)
    assert 0 < own.clip_fraction < 1
    one_by_one = torch.stack([
        frameworks.ppo_policy_loss(*(x.reshape(1) for x in row), frameworks.algorithm_config(base))[0]
        for row in zip(
            batch["action_log_probs"].flatten(), batch["old_action_log_probs"].flatten(),
            batch["advantages"].flatten(), strict=True,
        )
    ])  # fmt: skip
    by_hand = (one_by_one * own.weights.flatten() * own.mask.flatten()).sum()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-4)
    assert figures["fp8plan/clip_fraction"] == pytest.approx(own.clip_fraction)
    assert all(type(x) is float for x in figures.values())
    assert {"clip_ratio", "fp8plan/threshold_tis"} < set(figures)


def test_skyrl_says_what_to_type_without_rollout_logprobs() -> None:
    batch = padded(0, CALM) | {"rollout_action_logprobs": None}
    with pytest.raises(ConfigError, match=r"no rollout_logprobs; type generator.sampling_params.logprobs=1"):
        frameworks.skyrl_call(skyrl.policy_loss, frameworks.algorithm_config("fp8plan_regular"), batch)


def hook_step(framework: str, seed: int, sigma: float, settings: str) -> float:
    """Two micro-batches and an optimiser step, as a framework has them; C, as it was in the last one."""
    for micro in (2 * seed, 2 * seed + 1):
        if framework == "slime":
            *_, figures = frameworks.slime_call(slime.correct, ARGS, *slime_batch(micro, sigma))
        elif framework == "prime_rl":
            _, figures = frameworks.prime_rl_step(prime_rl.loss, {"settings": settings}, sequences(micro, sigma))
        else:
            config = frameworks.algorithm_config("fp8plan_regular")
            loss = frameworks.PolicyLossRegistry.get("fp8plan_regular")
            _, figures = frameworks.skyrl_call(loss, config, padded(micro, sigma))
    optimiser_steps()
    return float(torch.as_tensor(figures["fp8plan/threshold_tis"]).flatten()[0])


@pytest.mark.parametrize("framework", ["slime", "prime_rl", "skyrl"])
def test_thresholds_follow_the_kl_and_the_run_file_says_so(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settings_file(tmp_path, run_file="run.jsonl")
    monkeypatch.setenv("FP8PLAN_MONITOR", path)
    if framework == "skyrl":
        skyrl.register(path)
    spread = [CALM] * 2 + [WILD] * 3 + [CALM] * 30
    found = [hook_step(framework, seed, sigma, path) for seed, sigma in enumerate(spread)]
    assert found[:3] == [4.0] * 3  # the first wild step is still corrected with what calm ones led to
    assert 2 <= found[5] <= found[3] < 4.0
    assert found[5] < found[-1]
    # The same batches, seen whole, lead a Monitor to the same thresholds.
    monitor, whole = Monitor(), []
    for seed, sigma in enumerate(spread):
        monitor.step(*both(2 * seed, sigma), lengths=LENGTHS * 2)
        whole.append(monitor.thresholds.tis)
    assert found[1:] == pytest.approx(whole[:-1], rel=1e-6)
    micro_batches.stop()
    reader = RunReader(tmp_path / "run.jsonl")
    assert reader.read() == len(spread)
    assert reader.steps.column(schemas.TIS).tolist() == pytest.approx(found)
    assert reader.steps.numbers.tolist() == list(range(1, len(spread) + 1))
    assert min(reader.steps.column(schemas.K3_ROBUST)) >= 0


KEYWORD = inspect.Parameter.KEYWORD_ONLY


def test_signatures_are_those_of_the_frameworks() -> None:
    def names(function: Any) -> dict[str, Any]:
        return {x.name: x.kind for x in inspect.signature(function).parameters.values()}

    ours, theirs = names(slime.correct), names(frameworks.vanilla_tis_function)
    assert ours == theirs | dict.fromkeys(("total_lengths", "response_lengths"), KEYWORD)
    ours, theirs = names(skyrl.policy_loss), names(frameworks.ppo_policy_loss)
    assert ours == theirs | dict.fromkeys(("settings", "base"), KEYWORD)
    assert next(iter(names(prime_rl.loss))) == "inputs"
    assert [x.name for x in fields(frameworks.LossOutputs)] == ["loss", "metrics"]


# ------------------------------------------------------------------------------------------------ the sampling


def slime_args(**given: Any) -> SimpleNamespace:
    """slime's arguments of a rollout, at their defaults but for those given."""
    return SimpleNamespace(
        **({"use_tis": True, "rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1} | given)
    )


def test_slime_scores_on_the_kept_set_of_top_p_and_not_on_that_of_top_k_alone() -> None:
    assert slime.sampling_in(ARGS) is None  # of another slime
    found = slime.sampling_in(slime_args(rollout_temperature=0.8, rollout_top_p=0.9, rollout_top_k=50))
    assert found is not None
    assert (found.truncates, found.kept_set, found.remarks()) == (True, True, ())
    greedy = slime.sampling_in(slime_args(rollout_temperature=0.0))
    assert greedy is not None
    assert greedy.greedy
    cut = slime.sampling_in(slime_args(rollout_top_k=50))
    assert cut is not None
    assert "top_k 50 with uncut_logprobs: these are the log-probs before the cut" in cut.remarks()[0]


def skyrl_config(**given: Any) -> SimpleNamespace:
    """SkyRL's configuration, as far as it says how rollouts are sampled. engine: engine_init_kwargs"""
    engine = SimpleNamespace(engine_init_kwargs=given.pop("engine", {}))
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "additional_kwargs": None} | given
    return SimpleNamespace(
        generator=SimpleNamespace(sampling_params=SimpleNamespace(**params), inference_engine=engine),
        trainer=SimpleNamespace(algorithm=frameworks.algorithm_config("fp8plan_regular")),
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, ""),
        ({"temperature": 0.7}, "temperature 0.7 with raw_logprobs: these are the log-probs at temperature 1"),
        ({"temperature": 0.7, "engine": {"logprobs_mode": "processed_logprobs"}}, ""),
        ({"top_p": 0.9, "engine": {"logprobs_mode": "processed_logprobs"}}, r"top_p 0.9: vLLM renormalises"),
        ({"additional_kwargs": {"repetition_penalty": 1.1}}, "repetition_penalty 1.1 with raw_logprobs"),
    ],
)
def test_skyrls_own_configuration_says_how_it_samples(given: dict[str, Any], says: str) -> None:
    skyrl.register(None, skyrl_config(**given))
    registered = frameworks.PolicyLossRegistry.get("fp8plan_regular")
    settings = pickle.loads(pickle.dumps(registered)).keywords["settings"]  # to Ray's processes
    remarks = "; ".join(settings.sampling.remarks())
    assert says in remarks
    assert bool(says) == bool(remarks)


@pytest.mark.parametrize("framework", ["slime", "prime_rl", "skyrl"])
@pytest.mark.parametrize("replay", [False, True])
def test_a_trainer_that_replays_experts_has_no_routing_in_its_kl(
    framework: str, replay: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text(plans.saved(model="Qwen/Qwen3-30B-A3B").to_json())
    path = settings_file(tmp_path, run_file="run.jsonl", plan="plan.json", router_replay=replay)
    monkeypatch.setenv("FP8PLAN_MONITOR", path)
    if framework == "skyrl":
        skyrl.register(path, skyrl_config())
    hook_step(framework, 0, CALM, path)
    micro_batches.stop()
    (record,) = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    causes = [cause for part in record["attribution"] for cause in part["causes"]]
    assert "precision" in causes
    assert ("routing" in causes) is not replay


def test_slime_tells_that_it_replays_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def heard(settings: HookSettings, *, router_replay: bool, **options: Any) -> MicroBatches:
        told.append(router_replay)
        return micro_batches.running(settings, **options)

    monkeypatch.setattr(slime, "running", heard)
    for args in (ARGS, slime_args(use_rollout_routing_replay=True)):
        frameworks.slime_call(slime.correct, args, *slime_batch(0, CALM))
    assert told == [False, True]


@pytest.mark.parametrize("framework", ["slime", "prime_rl", "skyrl"])
def test_a_biased_sampling_is_in_a_hooks_run_file_and_warned_of_once(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settings_file(tmp_path, run_file="run.jsonl", sampling={"top_p": 0.8})
    monkeypatch.setenv("FP8PLAN_MONITOR", path)
    if framework == "skyrl":
        skyrl.register(path, skyrl_config(top_p=0.5))  # the settings go before it
    with pytest.warns(RuntimeWarning, match="the ratios are biased: top_p 0.8") as told:
        _ = [hook_step(framework, seed, CALM, path) for seed in range(2)]
    assert len(told) == 1
    micro_batches.stop()
    records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [record["sampling"] for record in records] == [asdict(Sampling(top_p=0.8))] * 2
    assert all("top_p 0.8: vLLM renormalises" in record["reason"] for record in records)
