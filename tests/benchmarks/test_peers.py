"""Peers' own tests, asked of fp8plan: what each verdict means, and what the adapters answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mismatch_batches import ragged

from benchmarks.peers import __main__ as command
from benchmarks.peers import skyrl
from benchmarks.peers.table import RESULTS, reasons, summary, unexplained
from fp8plan import jsonl

torch = pytest.importorskip("torch")

CONFIG = """
@dataclass
class OffPolicyCorrectionConfig(BaseConfig):
    token_tis_ratio_clip_high: float = 2.0
    tis_ratio_type: Optional[str] = None
"""
TESTS = """
import torch
from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import compute_tis_ratio
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.config import OffPolicyCorrectionConfig

def ratio(high):
    config = OffPolicyCorrectionConfig(token_tis_ratio_clip_high=high)
    return compute_tis_ratio(torch.zeros(1, 2), torch.tensor([[-1.0, 0.0]]), torch.ones(1, 2), "token", config)[0]

def test_passes():
    assert ratio(2.0).tolist() == [[2.0, 1.0]]

def test_fails():
    assert ratio(1.5).tolist() == [[2.0, 1.0]], "not as here"

def test_compute_tis_ratio_invalid_type():
    raise AssertionError if len(ratio(2.0)) else None

def test_of_something_else():
    assert OffPolicyCorrectionConfig().tis_ratio_type is None

def test_of_the_loss():
    PolicyLossRegistry.get("regular")
"""


@pytest.mark.slow
def test_each_test_has_its_verdict_and_its_reason(tmp_path: Path, capfd: Any) -> None:
    for file, text in ((skyrl.CONFIG, CONFIG), (skyrl.FILES[0], TESTS)):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    output = tmp_path / "peers.jsonl"
    assert command.main(["--skyrl", f"{tmp_path}@abc", "--output", str(output)]) == 1  # a fail without a known reason
    told = {row["test"]: (row["verdict"], row["reason"]) for row in jsonl.rows(output)}
    assert told == {
        "test_passes": ("pass", ""),
        "test_fails": ("fail", "AssertionError: not as here"),
        "test_compute_tis_ratio_invalid_type": ("fail", skyrl.OTHER_WORDS),
        "test_of_something_else": ("cannot be said", "it asks nothing of the correction"),
        "test_of_the_loss": ("cannot be said", "it is of SkyRL's policy loss; fp8plan's hook has its own tests"),
    }
    assert "| skyrl | `abc` | `test_off_policy_correction.py` | 5 | 1 | 2 | 2 |" in capfd.readouterr().out


def test_what_is_no_checkout_is_refused(tmp_path: Path, capsys: Any) -> None:
    for words, says in (
        ([], "no checkout; type one of --verl CHECKOUT"),
        (["--verl", str(tmp_path / "none")], "is no folder; allowed: a checkout, or FOLDER@COMMIT"),
        (["--verl", str(tmp_path)], f"is no git checkout; type {tmp_path}@COMMIT"),
    ):
        with pytest.raises(SystemExit):
            command.main(words)
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(8))
def test_skyrls_masks_are_those_of_their_definition(seed: int) -> None:
    """Outliers: a sequence goes with a token whose ratio is below `low` or above `high`."""
    train, rollout, mask = ragged(seed, sd=2.0)
    ratio, valid = (train - rollout).exp(), mask.float()
    config = SimpleNamespace(
        outlier_token_is_threshold_low=1e-2, outlier_token_is_threshold_high=50.0, geo_mask_high=1.4, geo_mask_low=0.6,
        token_mask_is_threshold_low=0.5, token_mask_is_threshold_high=3.0,
    )  # fmt: skip
    stays, figures = skyrl.outlier_token_mask(train, rollout, valid, config)
    outside = ((ratio < 1e-2) | (ratio > 50.0)) & mask
    assert torch.equal(stays.bool(), ~outside.any(1, keepdim=True))
    assert figures["outlier_seq_over_high_ratio"] == pytest.approx(
        float(((ratio > 50.0) & mask).any(1)[mask.any(1)].float().mean())
    )
    mean = ((train - rollout) * mask).sum(1) / mask.sum(1).clamp(min=1)
    kept = skyrl.sequence_mask(train, rollout, valid, "geometric", config)[0]
    assert torch.equal(kept[:, 0].bool(), ((mean.exp() >= 0.6) & (mean.exp() <= 1.4)) | ~mask.any(1))
    tokens = skyrl.token_mask(train, rollout, valid, config)[0]
    assert torch.equal(tokens.bool(), ((ratio >= 0.5) & (ratio <= 3.0)) | ~mask)


def test_the_committed_verdicts() -> None:
    rows = jsonl.rows(RESULTS)
    assert {row["peer"] for row in rows} == {"verl", "skyrl", "prime-rl"}
    assert not unexplained(rows)
    assert all(row["reason"] for row in rows if row["verdict"] != "pass")
    assert len(summary(rows).splitlines()) == 2 + len({(row["peer"], row["commit"], row["file"]) for row in rows})
    assert "test_bool_rollout_is_threshold_is_rejected" in reasons(rows)
