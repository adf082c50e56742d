"""One Monitor for the micro-batches of a process: its settings, its steps and its ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import frameworks
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
    responses,
    sequences,
    settings_file,
    slime_batch,
)
from plans import predicted, saved

from fp8plan import jsonl, schemas
from fp8plan.errors import ConfigError
from fp8plan.integrations import prime_rl, skyrl, slime
from fp8plan.integrations.hooks import HookSettings, running, settings_at
from fp8plan.model.precision import PRESETS
from fp8plan.runtime.watch.correction.settings import Rejection
from fp8plan.runtime.watch.monitor.monitor import Monitor

RULES = (Rejection("seq_mean", "k1", 1.3, 0.7), Rejection("token", "k3", 0.5))


@pytest.mark.parametrize(
    "settings",
    [
        HookSettings(),
        HookSettings(reject=RULES, veto=(0.05, 15.0), floor=0.5, thresholds="constant"),
        HookSettings(level=None, reject=RULES),
    ],
)
def test_micro_batches_of_a_step_add_up_to_the_whole_batch(settings: HookSettings) -> None:
    batches = running(settings)
    for seed in (0, 1):
        batches.correct(*(torch.cat(x) for x in responses(seed, WILD)), lengths=LENGTHS)
    optimiser_steps()
    optimiser_steps()  # of another model: nothing came in between
    correction = settings.correction()
    step = Monitor(correction, settings.controller(correction)).step(*both(0, WILD), lengths=LENGTHS * 2)
    assert batches.last is not None
    assert batches.monitor.steps == 1
    assert batches.last.thresholds == step.thresholds
    for name, value in step.metrics.items():
        if name != "fp8plan/monitor_s" and value is not None:
            assert batches.last.metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_figures_of_a_micro_batch_are_numbers_whatever_is_in_it() -> None:
    batches = running(HookSettings())
    train, rollout, masks = (torch.cat(x) for x in responses(0, WILD))
    usual = batches.figures(batches.correct(train, rollout, masks, lengths=LENGTHS))
    for odd, lost in (
        (batches.correct(train, rollout, masks * 0, lengths=LENGTHS), 0.0),
        (batches.correct(train * torch.nan, rollout, masks, lengths=LENGTHS), 1.0),
    ):
        found = batches.figures(odd)
        assert found.keys() == usual.keys()
        assert (found[schemas.CLIP_FRACTION], found[schemas.LOST_TOKENS]) == (0.0, lost)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"C": 2.0}, "takes no C; allowed: plan, thresholds, target_kl"),
        ({"tis": "two"}, "tis is 'two'; allowed: a number"),
        ({"tis": 0.5, "thresholds": "level"}, "tis begins at 0.5; allowed: above 1"),
        ({"level": "word"}, "level is 'word'; allowed: token, sequence, geometric, null"),
        ({"level": None, "floor": 0.5}, "floor is 0.5 without weights that are truncated; allowed: mode 'tis'"),
        ({"veto": [0.5, 0.9]}, "veto is (0.5, 0.9); allowed: between 0 and 1, (low, high)"),
        ({"reject": [{"over": "token", "estimator": "k1", "hi": 2.0}]}, "takes no hi (did you mean high?)"),
        ({"reject": [{"over": "seq_max", "estimator": "k1", "high": 2.0}]}, "no rejection 'seq_max_k1'; allowed"),
        (
            {"reject": [{"over": "tokens", "estimator": "k1", "high": 2.0}]},
            "reject[0].over is 'tokens'; allowed: token,",
        ),
        ({"reject": {"over": "token"}}, "reject is {'over': 'token'}; allowed: a list"),
        ({"band": [0.8, 1.2]}, "band with mode 'tis', which has none; allowed"),
        ({"mode": "mis", "band": [2.0, 0.5]}, "band is (2.0, 0.5); allowed: (low, high)"),
        (
            {"thresholds": "constant", "target_kl": 0.01},
            'target_kl with constant thresholds, which have none; allowed: thresholds "level"',
        ),
        ({"thresholds": "tight"}, 'thresholds is \'tight\'; allowed: null, the default law, "constant", or "level"'),
        ({"plan": "no.json"}, "fp8plan plan MODEL --gpu GPU --json plan.json"),
        ({"sampling": {"topp": 0.9}}, "takes no topp (did you mean top_p?); allowed: temperature, top_p"),
        ({"sampling": {"top_p": 9}}, "top_p is 9.0; allowed: above 0, 1 at most"),
        ({"sampling": 0.9}, "sampling is 0.9; allowed: an object with named fields"),
        ([1], "is [1]; allowed: an object with named keys"),
        ("{", "hook's settings file"),
    ],
)
def test_bad_settings_give_one_error(content: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "monitor.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    monkeypatch.setenv("FP8PLAN_MONITOR", str(path))
    for call in (
        lambda: frameworks.slime_call(slime.correct, ARGS, *slime_batch(0, CALM)),
        lambda: frameworks.prime_rl_step(prime_rl.loss, {}, sequences(0, CALM)),
        skyrl.register,
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert said in str(caught.value)
        assert str(tmp_path) in str(caught.value)
    assert not [x for x in frameworks.PolicyLossRegistry._functions if x.startswith("fp8plan")]


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json: No such file.*FP8PLAN_MONITOR"):
        settings_at(tmp_path / "none.json")


def test_only_one_rank_of_a_tensor_parallel_group_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_at(settings_file(tmp_path, run_file="run.jsonl"))
    megatron(monkeypatch, tp_rank=1)
    running(settings).correct(*(torch.cat(x) for x in responses(0, CALM)), lengths=LENGTHS)
    optimiser_steps()
    assert running(settings).monitor.steps == 1
    assert not (tmp_path / "run.jsonl").exists()


RANK = """
import json, sys
from datetime import timedelta
import torch
from torch import distributed
from fp8plan.integrations.hooks import HookSettings, running, stop
rank, folder = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                               timeout=timedelta(seconds=60))
some = torch.nn.Parameter(torch.ones(1))
some.grad = torch.ones(1)
optimiser = torch.optim.SGD([some])
chance = torch.Generator().manual_seed(rank)
level = {"thresholds": "level", "target_kl": 0.001}
shared = running(HookSettings(**level, run_file=folder + "/shared.jsonl"))
alone = running(HookSettings(**level, run_file=folder + "/alone.jsonl", share=False))
found = []
for step in range(4):
    for _ in range(1 + rank):  # ranks may have different numbers of micro-batches
        train = -9 - torch.rand(400, generator=chance)
        rollout = train + (1.0 if rank else 0.01) * torch.randn(400, generator=chance)
        both = [one.correct(train, rollout, lengths=[400]).thresholds.tis for one in (shared, alone)]
    optimiser.step()
    found.append(both)
stop()
print(json.dumps(found))
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_share_their_statistics_unless_they_are_told_not_to(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    one, other = (json.loads(rank.communicate(timeout=120)[0]) for rank in ranks)
    assert [x[0] for x in one] == [x[0] for x in other]  # shared
    assert one[-1][0] < 4.0  # by rank 1's mismatch
    assert [x[1] for x in one] == [4.0] * 4  # alone: rank 0 sees no mismatch
    assert other[-1][1] < 4.0
    rows = {}
    for name in ("shared", "alone"):
        rows[name] = [row["metrics"]["fp8plan/tokens"] for row in jsonl.rows(tmp_path / f"{name}.jsonl")]
    assert rows == {"shared": [1200] * 4, "alone": [400] * 4}


def test_hooks_import_without_torch_and_without_the_frameworks() -> None:
    code = """
import sys
from fp8plan.integrations import prime_rl, skyrl, slime
loaded = {"torch", "slime", "prime_rl", "skyrl", "megatron", "ray"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plan_beside_the_settings_says_what_kl_to_expect(tmp_path: Path) -> None:
    """And which thresholds to hold. Paths are relative to the settings' file; target_kl goes before a prediction."""
    choices = tuple(predicted(name, kl_k3=0.2, kl_k3_high=0.3) for name in PRESETS)
    planned = saved(choices=choices, thresholds={"token_tis": 1.5})
    (tmp_path / "plan.json").write_text(planned.to_json())
    batches = running(settings_at(settings_file(tmp_path, plan="plan.json")))
    assert batches.monitor.state == Monitor(plan=planned).state
    assert (batches.monitor.state.limit_kl, batches.monitor.thresholds.tis) == (0.3, 1.5)
    (tmp_path / "told").mkdir()
    level = {"plan": "../plan.json", "thresholds": "level", "target_kl": 0.001}
    told = running(settings_at(settings_file(tmp_path / "told", **level)))
    assert (told.monitor.state.target_kl, told.monitor.thresholds.tis) == (0.001, 1.5)


def test_a_plan_with_router_replay_leaves_no_part_of_the_kl_to_routing(tmp_path: Path) -> None:
    planned = saved(model="Qwen/Qwen3-30B-A3B")
    causes = {}
    for replay in (False, True):
        plan = replace(planned, remedies=replace(planned.remedies, router_replay=replay))
        (tmp_path / f"{replay}").mkdir()
        (tmp_path / f"{replay}" / "plan.json").write_text(plan.to_json())
        batches = running(settings_at(settings_file(tmp_path / f"{replay}", plan="plan.json", sampling={})))
        logprobs = -torch.rand(2, 8)
        step = batches.monitor.step(logprobs, logprobs - 0.01, fresh=True)
        causes[replay] = {cause for part in step.attribution for cause in part.causes}
    assert "routing" in causes[False]
    assert "routing" not in causes[True]
