"""The corrections of SkyRL and slime, by their own words, beside their formulas: written out, one sequence at a time.

The formulas are those of SkyRL's off_policy_correction_utils.py and slime's `vanilla_tis_function` and mis.py, in the
commits that fp8plan/integrations names.
"""

from __future__ import annotations

from math import exp, inf, prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import frameworks
import plans
import pytest
import torch
from hook_batches import ARGS, LENGTHS, padded, responses, sequences, settings_file, slime_batch

from fp8plan.errors import ConfigError
from fp8plan.integrations import hooks, prime_rl, skyrl, slime
from fp8plan.integrations.hooks import HookSettings, settings_at

SIGMA = 0.3  # of the log ratios: products of some sequences leave their bounds, those of others do not
Rows = list[list[float]]


def ratios_of(train: Any, rollout: Any) -> Rows:
    return [[exp(t - r) for t, r in zip(*pair, strict=True)] for pair in zip(train, rollout, strict=True)]


def mean(ratios: list[float]) -> float:
    return prod(ratios) ** (1 / len(ratios))


def in_response(ratios: list[float], mask: Any) -> list[float]:
    """The ratios of a sequence's tokens that count."""
    return [ratio for ratio, counts in zip(ratios, mask.tolist(), strict=True) if counts]


# ------------------------------------------------------------------------------------------------------- SkyRL


def skyrls(asked: frameworks.OffPolicyCorrectionConfig, ratios: list[float], live: list[float]) -> tuple[Any, Any]:
    """SkyRL's (weights, keeps) of one sequence. live: its ratios of tokens that count"""
    weights, keeps = [1.0] * len(ratios), [True] * len(ratios)
    if asked.tis_ratio_type == "token":
        weights = [min(ratio, asked.token_tis_ratio_clip_high) for ratio in ratios]
    if asked.tis_ratio_type == "sequence":
        weights = [min(prod(live), asked.sequence_tis_ratio_clip_high)] * len(ratios)
    if asked.token_mask_is_threshold_low is not None and asked.token_mask_is_threshold_high is not None:
        keeps = [asked.token_mask_is_threshold_low <= ratio <= asked.token_mask_is_threshold_high for ratio in ratios]
    whole = all(
        (asked.outlier_token_is_threshold_low or 0.0) <= ratio <= (asked.outlier_token_is_threshold_high or inf)
        for ratio in live
    )
    if asked.sequence_mask_metric == "geometric":
        whole = whole and asked.geo_mask_low <= mean(live) <= asked.geo_mask_high
    if asked.sequence_mask_metric == "product":
        whole = whole and asked.product_mask_low <= prod(live) <= asked.product_mask_high
    return weights, [kept and whole for kept in keeps]


@pytest.mark.parametrize(
    "correction",
    [
        {"sequence_mask_metric": "geometric", "geo_mask_low": 0.97, "geo_mask_high": 1.03},
        {"sequence_mask_metric": "product", "tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2},
        {"outlier_token_is_threshold_high": 1.5},
        {"outlier_token_is_threshold_low": 0.5, "outlier_token_is_threshold_high": 2.5, "tis_ratio_type": "sequence"},
        {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.3, "tis_ratio_type": "token"},
        {"sequence_mask_metric": "geometric", "outlier_token_is_threshold_low": 0.5, "geo_mask_high": 1.2},
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_skyrls_own_correction_is_fp8plans(correction: dict[str, Any], seed: int) -> None:
    config, batch = frameworks.algorithm_config("fp8plan_regular", **correction), padded(seed, SIGMA)
    ratios = ratios_of(batch["old_action_log_probs"], batch["rollout_action_logprobs"])
    rows = [
        skyrls(config.off_policy_correction, row, in_response(row, mask))
        for row, mask in zip(ratios, batch["loss_mask"], strict=True)
    ]
    weights, keeps = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    assert not keeps[batch["loss_mask"] > 0].all() or config.off_policy_correction.tis_ratio_type
    wanted, _ = frameworks.ppo_policy_loss(
        batch["action_log_probs"], batch["old_action_log_probs"], batch["advantages"] * weights,
        frameworks.algorithm_config("regular"), batch["loss_mask"] * keeps,
    )  # fmt: skip
    loss, _ = frameworks.skyrl_call(skyrl.policy_loss, config, batch)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("correction", "settings", "says"),
    [
        ({"sequence_mask_metric": "median"}, {}, "sequence_mask_metric is 'median'; allowed: None, 'geometric', 'prod"),
        ({"tis_ratio_type": "word"}, {}, "tis_ratio_type is 'word'; allowed: None, 'token', 'sequence'"),
        (
            {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0, "tis_ratio_type": "sequence"},
            {},
            "off_policy_correction: token_mask_is_threshold_low with a ratio of whole sequences",
        ),
        ({"tis_ratio_type": "token"}, {"tis": 3.0}, "asks for a correction, and so do the hook's settings; allowed"),
        ({"outlier_token_is_threshold_high": 0.5}, {}, "off_policy_correction: veto is"),
    ],
)
def test_a_correction_of_skyrls_that_cannot_be_is_refused_where_the_losses_are_registered(
    correction: dict[str, Any], settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    config = SimpleNamespace(
        trainer=SimpleNamespace(algorithm=frameworks.algorithm_config("fp8plan_regular", **correction))
    )
    with pytest.raises(ConfigError, match=says):
        skyrl.register(settings_file(tmp_path, **settings), config)
    assert "fp8plan_regular" not in frameworks.PolicyLossRegistry._functions


# ------------------------------------------------------------------------------------------------------- slime

MIS = {
    "use_tis": True, "use_rs": False, "tis_level": "token", "rs_level": "token", "tis_mode": "truncate",
    "tis_lower_bound": None, "tis_upper_bound": 1.3, "rs_lower_bound": None, "rs_upper_bound": None,
    "rs_veto_threshold": None, "tis_batch_normalize": False,
}  # fmt: skip


def slimes(args: Any, ratios: list[float], live: list[float]) -> tuple[Any, Any]:
    """slime's (weights, keeps) of one response."""
    whole = {"token": ratios, "sequence": [prod(live)] * len(ratios), "geometric": [mean(live)] * len(ratios)}
    if not hasattr(args, "tis_mode"):
        return [min(max(ratio, args.tis_clip_low), args.tis_clip) for ratio in ratios], [True] * len(ratios)
    high = args.tis_upper_bound
    low = args.tis_lower_bound or 1 / high
    weights, keeps = whole[args.tis_level], [True] * len(ratios)
    if args.tis_mode == "truncate":
        weights = [min(weight, high) for weight in weights]
    if args.tis_mode == "clip":
        weights = [min(max(weight, low), high) for weight in weights]
    if args.tis_mode == "mask":
        keeps = [low <= weight <= high for weight in weights]
    if args.use_rs:
        least, most = args.rs_lower_bound or low, args.rs_upper_bound or high
        passed = min(live) >= (args.rs_veto_threshold or 0.0)
        rejecting = [least <= ratio <= most for ratio in whole[args.rs_level]]
        keeps = [kept and inside and passed for kept, inside in zip(keeps, rejecting, strict=True)]
    return weights, keeps


@pytest.mark.parametrize(
    "changed",
    [
        {"tis_clip": 1.5, "tis_clip_low": 0.0},
        {"tis_clip": 2.0, "tis_clip_low": 0.9},
        MIS,
        MIS | {"tis_mode": "clip", "tis_lower_bound": 0.9},
        MIS | {"tis_mode": "clip", "tis_level": "geometric", "tis_upper_bound": 1.01},
        MIS | {"tis_mode": "mask", "tis_level": "sequence", "tis_upper_bound": 3.0},
        MIS | {"use_rs": True, "rs_veto_threshold": 0.4},
        MIS | {"use_rs": True, "rs_level": "sequence", "rs_lower_bound": 0.3, "rs_upper_bound": 4.0},
        MIS | {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.97, "rs_upper_bound": 1.03},
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_slimes_own_correction_is_fp8plans(changed: dict[str, Any], seed: int) -> None:
    args = SimpleNamespace(**({"use_tis": True} | changed))
    pg_loss, batch = slime_batch(seed, SIGMA)
    ratios = ratios_of(batch["log_probs"], batch["rollout_log_probs"])
    rows = [slimes(args, row, in_response(row, mask)) for row, mask in zip(ratios, batch["loss_masks"], strict=True)]
    loss, masks, _ = frameworks.slime_call(slime.correct, args, pg_loss, batch)
    wanted = torch.cat([torch.tensor(keeps) * mask for (_, keeps), mask in zip(rows, batch["loss_masks"], strict=True)])
    assert torch.equal(torch.cat(masks), wanted)
    assert [len(mask) for mask in masks] == LENGTHS
    weights = torch.cat([torch.tensor(row[0]) for row in rows])
    assert torch.allclose((loss / pg_loss)[wanted > 0], weights[wanted > 0], rtol=1e-5)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (MIS | {"tis_batch_normalize": True}, "type: tis_batch_normalize: false"),
        (MIS | {"tis_mode": "soft"}, "tis_mode is 'soft'; allowed: truncate, clip, mask"),
        (MIS | {"rs_level": "turn"}, "rs_level is 'turn'; allowed: token, sequence, geometric"),
        ({"tis_clip": 2.0, "tis_clip_low": 1.2}, "slime's arguments: floor is 1.2; allowed: 0 to 1"),
    ],
)
def test_a_correction_of_slimes_that_fp8plan_does_not_have_is_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        frameworks.slime_call(slime.correct, SimpleNamespace(**({"use_tis": True} | changed)), *slime_batch(0, SIGMA))


def test_a_plans_thresholds_do_not_replace_the_trainers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_text(plans.saved().to_json())
    monkeypatch.setenv("FP8PLAN_MONITOR", settings_file(tmp_path, plan="plan.json"))
    args = SimpleNamespace(use_tis=True, tis_clip=1.25, tis_clip_low=0.0)
    *_, figures = frameworks.slime_call(slime.correct, args, *slime_batch(0, SIGMA))
    assert float(figures["fp8plan/threshold_tis"].unique()) == 1.25


# ------------------------------------------------------------------------------------------- settings and prime-rl


def test_a_rejection_without_weights_leaves_them_at_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As typed in the hook's own settings. The first response has the geometric mean that leaves the bounds."""
    rule = {"over": "seq_mean", "estimator": "k1", "low": 0.97, "high": 1.03}
    path = settings_file(tmp_path, level=None, reject=[rule])
    monkeypatch.setenv("FP8PLAN_MONITOR", path)
    pg_loss, batch = slime_batch(0, SIGMA)
    loss, masks, figures = frameworks.slime_call(slime.correct, ARGS, pg_loss, batch)
    assert torch.equal(loss, pg_loss)
    assert "fp8plan/threshold_tis" not in figures
    train, rollout, loss_masks = responses(0, SIGMA)
    means = [mean(in_response(*pair)) for pair in zip(ratios_of(train, rollout), loss_masks, strict=True)]
    kept = [0.97 <= x <= 1.03 for x in means]
    assert 0 < sum(kept) < len(kept)
    assert [bool(mask.any()) for mask in masks] == kept
    assert settings_at(path).correction() == HookSettings(level=None, reject=(skyrl.Rejection(**rule),)).correction()
    hooks.stop()


def test_settings_of_prime_rls_own_loss_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.loss\.kwargs takes no dppo_mask_high; allowed: settings"):
        frameworks.prime_rl_step(prime_rl.loss, {"dppo_mask_high": 0.2}, sequences(0, SIGMA))
