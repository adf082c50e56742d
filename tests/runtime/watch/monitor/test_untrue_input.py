"""A measurement that is missing, untrue or not comparable is named by an alarm, or refused with nothing changed."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8plan import schemas
from fp8plan.errors import ConfigError
from fp8plan.integrations.common import STATE_FILE, load_state
from fp8plan.integrations.hooks import MicroBatches
from fp8plan.runtime.watch.controller.alarms import Alarm
from fp8plan.runtime.watch.controller.laws import ConstantThresholds, LevelThresholds
from fp8plan.runtime.watch.controller.state import AlarmLimits, Decision
from fp8plan.runtime.watch.correction.correct import CorrectionSettings, Thresholds
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.sinks import Callback

pytestmark = pytest.mark.filterwarnings("ignore:.*alarm")

LAWS = [ConstantThresholds(), LevelThresholds()]
NAN = math.nan


def policies(rows: int = 8, length: int = 2_000, sigma: float = 0.08, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(train, rollout) log-probs [rows, length] of two policies of 200 tokens, sampled from the second."""
    chance = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, length, 200, generator=chance)
    rollout = logits.log_softmax(-1)
    train = (logits + sigma * torch.randn(logits.shape, generator=chance)).log_softmax(-1)
    sampled = torch.multinomial(rollout.exp().view(-1, 200), 1, generator=chance).view(rows, length, 1)
    return train.gather(-1, sampled).squeeze(-1), rollout.gather(-1, sampled).squeeze(-1)


def noisy(rows: int, length: int, k3: float, bias: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(train, rollout) whose log ratios are normal with mean -k3 - bias and variance 2 k3."""
    chance = torch.Generator().manual_seed(1)
    rollout = -4 * torch.rand(rows, length, generator=chance) - 3
    return rollout - k3 - bias + math.sqrt(2 * k3) * torch.randn(rows, length, generator=chance), rollout


def stepped(train: Any, rollout: Any, mask: Any = None, **settings_of_monitor: Any) -> tuple[Any, dict[str, Any]]:
    """(step, record) of the first step of a Monitor."""
    records: list[Any] = []
    with Monitor(sinks=[Callback(records.append)], **settings_of_monitor) as monitor:
        step = monitor.step(train, rollout, torch.ones(train.shape, dtype=torch.bool) if mask is None else mask)
    return step, records[-1]


# Absent


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [NAN, -math.inf])
def test_without_a_valid_token_nothing_is_perfect(law: Any, side: int, bad: float) -> None:
    sides = list(policies(length=100))
    sides[side] = torch.full_like(sides[side], bad)
    step, record = stepped(*sides, controller=law)
    assert step.decided.decision is Decision.NO_DATA
    assert step.decided.alarms == (Alarm.INVALID, Alarm.LOST)
    assert "all 800 are NaN or infinite" in step.decided.reason
    figures = ("rollout_corr/kl", schemas.K3, schemas.K3_ROBUST, schemas.ESS, schemas.ESS_RAW, schemas.CLIP_FRACTION)
    assert {step.metrics[name] for name in figures} == {record["metrics"][name] for name in figures} == {None}
    assert step.metrics[schemas.LOST_TOKENS] == step.metrics[schemas.LOST_WEIGHT] == 1.0
    assert step.metrics[schemas.LOST_SEQUENCES] == 1.0
    assert record["alarms"] == ["invalid", "lost"]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 400), st.integers(0, 2**20))
def test_lost_tokens_count_the_invalid_ones_and_a_share_of_them_alarms(number: int, seed: int) -> None:
    train, rollout = policies(length=50)
    where = np.random.default_rng(seed).permutation(400)[:number]
    train.view(-1)[where] = NAN
    step, _ = stepped(train, rollout)
    assert step.metrics[schemas.LOST_TOKENS] == pytest.approx(number / 400)
    assert (Alarm.INVALID in step.decided.alarms) == (number > 0)
    lost = Alarm.LOST in step.decided.alarms
    assert lost == (number > 205) or 190 < number <= 205  # weights have a mean of about 1


def test_a_hooks_step_without_a_valid_token_leaves_a_record() -> None:
    records: list[Any] = []
    batches = MicroBatches(Monitor(sinks=[Callback(records.append)]))
    try:
        layer = torch.nn.Linear(1, 1)
        optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            train, rollout = policies(length=50)
            batches.correct(train * NAN, rollout)
        layer.weight.grad = torch.zeros_like(layer.weight)
        optimiser.step()
        assert [(x["alarms"], x["metrics"]["fp8plan/invalid"]) for x in records] == [(["invalid", "lost"], 800)]
        optimiser.step()  # no micro-batch since: no step
        assert len(records) == 1
    finally:
        batches.close()


@pytest.mark.parametrize("level", ["token", "sequence", None])
def test_a_loss_that_is_left_out_cannot_spoil_the_mean(level: Any) -> None:
    train, rollout = policies(length=50)
    train[0, 3] = NAN
    step, _ = stepped(train, rollout, settings=CorrectionSettings(level=level))
    losses = train.clone().requires_grad_()
    loss = step.loss(losses)
    loss.backward()
    valid = train.isfinite()
    weights = torch.ones_like(train) if level is None else torch.as_tensor(step.weights)
    assert float(loss.detach()) == pytest.approx(float((weights * train)[valid].sum() / valid.sum()), rel=1e-5)
    assert bool(losses.grad is not None and losses.grad.isfinite().all())
    with pytest.raises(ConfigError, match=r"token_losses have shape \(8,\); allowed: .* \(8, 50\)"):
        step.loss(losses.sum(1))


# The correction's own work


def test_sequence_weights_that_lose_the_batch_alarm() -> None:
    masking = CorrectionSettings("sequence", "mis", Thresholds(None, (0.5, 2.0)))
    eos = torch.zeros(32, 200)
    eos[:, -1] = -4.4  # the trainer's log-prob of an EOS that nobody sampled, which the engine's side has as 0
    train, rollout = noisy(32, 200, 1e-9)
    rollout[:, -1] = 0.0
    cases: dict[str, tuple[torch.Tensor, torch.Tensor, CorrectionSettings]] = {
        "ordinary noise, 8,192 tokens": (*noisy(32, 8192, 3e-3), masking),
        "the same, truncated": (*noisy(32, 8192, 3e-3), CorrectionSettings("sequence")),
        "one synthetic token": (rollout + eos, rollout, CorrectionSettings("sequence")),
        "a bias of 0.03 a token": (*noisy(32, 2000, 1e-3, 0.03), CorrectionSettings("sequence")),
        "a geometric band beside the mean": (
            *noisy(32, 2000, 1e-3, 0.03), CorrectionSettings("geometric", "icepop", Thresholds(None, (0.99, 1.01))),
        ),
        "a rejection of all": (*noisy(32, 8192, 3e-3), CorrectionSettings(veto=0.9)),
    }  # fmt: skip
    for name, (train, rollout, correction) in cases.items():
        step, record = stepped(train, rollout, settings=correction)
        assert Alarm.LOST in step.decided.alarms, name
        assert record["metrics"][schemas.LOST_WEIGHT] > 0.9, name
        if correction.level == "sequence":
            assert Alarm.UNIT_MEAN in step.decided.alarms, name


def test_the_warning_names_the_remedy_once() -> None:
    train, rollout = noisy(32, 8192, 3e-3)
    monitor = Monitor(CorrectionSettings("sequence"))
    with pytest.warns(RuntimeWarning, match="alarm lost: .*level='token'"):
        monitor.step(train, rollout, lengths=None)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("seed", range(5))
def test_honest_policies_sound_no_alarm(level: Any, seed: int) -> None:
    for mode in ("tis", "icepop"):
        start = Thresholds(2.0) if mode == "tis" else Thresholds(None, (0.2, 5.0))
        step, _ = stepped(*policies(24, 100, seed=seed), settings=CorrectionSettings(level, mode, start))
        assert step.decided.alarms == ()


# Units and identity


UNITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negative log-likelihoods": torch.neg,
    "probabilities": torch.exp,
    "perplexities": lambda x: (-x).exp(),
}


@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("unit", UNITS)
def test_what_is_no_log_probability_is_refused(unit: str, sides: tuple[bool, bool]) -> None:
    monitor = Monitor()
    train, rollout = (UNITS[unit](x) if odd else x for x, odd in zip(policies(length=100), sides, strict=True))
    with pytest.raises(ConfigError, match=r"logprobs have a mean above 0 in 8 of 8 sequences; allowed: .* -x for los"):
        monitor.step(train, rollout, torch.ones(train.shape))
    assert monitor.steps == 0


@pytest.mark.parametrize("row", range(8))
def test_one_negated_row_is_refused(row: int) -> None:
    train, rollout = policies(length=100)
    train[row], rollout[row] = -train[row], -rollout[row]
    with pytest.raises(ConfigError, match="train_logprobs have a mean above 0 in 1 of 8"):
        Monitor().step(train, rollout, torch.ones(train.shape))


def test_base_10_is_named_and_natural_logarithms_are_not() -> None:
    train, rollout = policies(16, 2_000, sigma=0.2)
    assert stepped(train / math.log(10), rollout / math.log(10))[0].decided.alarms == (Alarm.UNITS,)
    assert stepped(train, rollout)[0].decided.alarms == ()


def test_the_same_tensor_on_both_sides_is_named() -> None:
    train, rollout = policies(length=100)
    assert stepped(train, train.clone())[0].decided.alarms == (Alarm.IDENTICAL,)
    assert stepped(train, rollout)[0].decided.alarms == ()
    off = ConstantThresholds(limits=AlarmLimits(identical=math.inf))
    assert stepped(train, train.clone(), controller=off)[0].decided.alarms == ()


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("every", [1, 10, 200])
def test_log_probs_that_were_filled_in_are_named(side: int, every: int) -> None:
    sides = list(policies(length=200))
    assert stepped(*sides)[0].decided.alarms == ()
    sides[side].view(-1)[::every] = 0.0
    step, _ = stepped(*sides)
    assert Alarm.PLACEHOLDERS in step.decided.alarms
    unsure = (sides[1 - side].view(-1)[::every] < -0.1).sum()
    assert step.mismatch.placeholder_share == pytest.approx(float(unsure) / 1600)


def test_tokens_that_both_sides_are_sure_of_are_no_placeholders() -> None:
    train, rollout = policies(length=200)
    train[:, ::2], rollout[:, ::2] = 0.0, -1e-4
    assert stepped(train, rollout)[0].mismatch.placeholder_share == 0.0


OTHER_TOKENS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shifted by a token": lambda x: x.roll(1, dims=1),
    "responses in another order": lambda x: x.roll(1, dims=0),
    "another token from the middle on": lambda x: torch.cat([x[:, :50], x[:, 50:].roll(7, dims=1)], dim=1),
}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("change", OTHER_TOKENS)
def test_log_probs_of_other_tokens_are_noticed(change: str, side: int) -> None:
    sides = list(policies(length=100))
    sides[side] = OTHER_TOKENS[change](sides[side])
    assert {Alarm.KL, Alarm.RAW_ESS, Alarm.TAIL} <= set(stepped(*sides)[0].decided.alarms)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([0.5, -100, 2, 17, NAN, -1]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.int8]),
)
def test_a_mask_of_other_numbers_is_refused(number: float, dtype: torch.dtype) -> None:
    train, rollout = policies(length=20)
    mask = torch.ones(train.shape, dtype=dtype)
    if not dtype.is_floating_point and number != number // 1:
        return
    mask[3, 4] = number
    with pytest.raises(ConfigError, match=r"mask holds .* allowed: 1 where a token was sampled"):
        Monitor().step(train, rollout, mask)
    mask[3, 4] = 0
    assert Monitor().step(train, rollout, mask).mismatch.tokens == 159


# Settings and saved state


@pytest.mark.parametrize("law", [ConstantThresholds, LevelThresholds])
@pytest.mark.parametrize("bad", [0, -1, NAN, None, "0.03", True, [1.0]])
def test_a_limit_that_disarms_is_refused(law: Any, bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"limit_kl is .*; allowed: nats per token, above 0"):
        law(limit_kl=bad)
    with pytest.raises(ConfigError, match=r"limits is .*; allowed: an AlarmLimits"):
        law(limits=bad)
    law(limit_kl=math.inf)


@pytest.mark.parametrize("name", AlarmLimits.__slots__)
@pytest.mark.parametrize("bad", [NAN, -0.5, None, "1", True])
def test_a_level_that_is_none_is_refused(name: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=f"AlarmLimits: {name} is"):
        AlarmLimits(**{name: bad})


@pytest.mark.parametrize(("name", "bad"), [("tail_bound", 0), ("tail_bound", 1), ("tail", 1.5), ("raw_ess", 2)])
def test_a_level_out_of_range_is_refused(name: str, bad: float) -> None:
    with pytest.raises(ConfigError, match=f"AlarmLimits: {name} is"):
        AlarmLimits(**{name: bad})


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_saved_state_with_an_impossible_value_is_refused_and_changes_nothing(law: Any, data: st.DataObject) -> None:
    monitor = Monitor(controller=law)
    monitor.step(*policies(length=20), torch.ones(8, 20))
    saved = monitor.state_dict()
    name = data.draw(st.sampled_from(["steps", "controller/steps", "controller/kl", "controller/limit_kl"]))
    bad = data.draw(st.sampled_from([-1, -5, NAN, "x", [], True, {}]))
    if name == "steps":
        odd = saved | {"steps": bad}
    else:
        odd = saved | {"controller": saved["controller"] | {name.partition("/")[2]: bad}}
    with pytest.raises(ConfigError):
        monitor.load_state_dict(odd)
    assert monitor.state_dict() == saved


@pytest.mark.parametrize("content", [b"\xff\xfe{", b"{", b"[]", b'{"steps": 1}'])
def test_a_state_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STATE_FILE).write_bytes(content)
    with pytest.raises(ConfigError):
        Monitor().load_state_dict(load_state(tmp_path) or {})


# Ranks


RANK = """
import sys, warnings
from datetime import timedelta
import torch
from torch import distributed
from fp8plan import Monitor
from fp8plan.errors import ConfigError
warnings.simplefilter("ignore")
rank, port = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3,
                               timeout=timedelta(seconds=40))
monitor = Monitor()
rollout = -torch.rand(4, 16)
mask = torch.ones(4, 16)
bad = {
    "shape": (rollout - 0.01, rollout[:2], mask), "units": (-rollout, rollout, mask),
    "mask": (rollout - 0.01, rollout, mask * 0.5), "no tensor": (object(), rollout, mask),
}
for name, odd in bad.items():
    before = monitor.state_dict()
    try:
        monitor.step(*(odd if rank == 1 else (rollout - 0.01, rollout, mask)))
    except ConfigError as error:
        assert ("rank 1 of the group refused its batch" in str(error)) == (rank != 1), (name, error)
    else:
        raise AssertionError(f"rank {rank} took the step of {name}")
    assert monitor.state_dict() == before
    assert monitor.step(rollout - 0.01, rollout, mask).mismatch.tokens == 3 * 64
assert monitor.steps == len(bad)
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_when_one_rank_refuses_all_do_and_the_next_step_pairs() -> None:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port = str(some.getsockname()[1])
    running = [
        subprocess.Popen([sys.executable, "-c", RANK, str(n), port], stderr=subprocess.PIPE, text=True)
        for n in range(3)
    ]
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], errors
