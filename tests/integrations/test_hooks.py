"""The hooks, called as slime, prime-rl and SkyRL call: the result is fp8plan's own correction, and thresholds move."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import frameworks
import pytest
import torch

from fp8plan.errors import ConfigError
from fp8plan.integrations import micro_batches, prime_rl, skyrl, slime
from fp8plan.integrations.micro_batches import running
from fp8plan.integrations.settings import HookSettings, settings_at
from fp8plan.runtime.correction.correct import Correction, CorrectionSettings, Thresholds, correct
from fp8plan.runtime.mismatch.tokens import pack
from fp8plan.runtime.monitor.monitor import Monitor
from fp8plan.runtime.monitor.run_file import RunReader

LENGTHS = [30, 7, 50, 13]
CALM, WILD = 0.02, 1.0  # spread of the log ratios: KL far below and far above the target of 0.01


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test begins without monitors, and leaves no hook in torch's optimisers."""
    monkeypatch.delenv("FP8PLAN_MONITOR", raising=False)
    frameworks.install(monkeypatch, "prime_rl.trainer.rl.loss", LossOutputs=frameworks.LossOutputs)
    registry = dict.fromkeys(("regular", "dual_clip"), frameworks.ppo_policy_loss)
    monkeypatch.setattr(frameworks.PolicyLossRegistry, "_functions", registry)
    place = "skyrl.backends.skyrl_train.utils.ppo_utils"
    frameworks.install(monkeypatch, place, PolicyLossRegistry=frameworks.PolicyLossRegistry)
    yield
    micro_batches.stop()


def settings_file(folder: Path, **settings: Any) -> str:
    path = folder / "monitor.json"
    path.write_text(json.dumps(settings))
    return str(path)


def optimiser_steps() -> None:
    """What every trainer does after its micro-batches."""
    some = torch.nn.Parameter(torch.ones(1))
    some.grad = torch.ones(1)
    torch.optim.AdamW([some]).step()


def responses(seed: int, sigma: float) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """(train, rollout, mask) of each response."""
    chance = torch.Generator().manual_seed(seed)
    train = [-torch.rand(n, generator=chance) for n in LENGTHS]
    rollout = [x + sigma * torch.randn(len(x), generator=chance) for x in train]
    masks = [(torch.rand(n, generator=chance) > 0.2).int() for n in LENGTHS]
    return train, rollout, masks


def both(seed: int, sigma: float) -> list[torch.Tensor]:
    """Two micro-batches, packed into one."""
    pairs = zip(responses(seed, sigma), responses(seed + 1, sigma), strict=True)
    return [torch.cat([*one, *other]) for one, other in pairs]


def padded(seed: int, sigma: float) -> dict[str, Any]:
    """A micro-batch of SkyRL."""
    train, rollout, masks = (torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in responses(seed, sigma))
    chance = torch.Generator().manual_seed(seed + 1)
    now = (train + 0.3 * torch.randn(train.shape, generator=chance)).requires_grad_()
    return {
        "action_log_probs": now, "old_action_log_probs": train, "rollout_action_logprobs": rollout,
        "advantages": torch.randn(train.shape, generator=chance), "loss_mask": masks,
    }  # fmt: skip


def slime_batch(seed: int, sigma: float) -> tuple[torch.Tensor, dict[str, Any]]:
    train, rollout, masks = responses(seed, sigma)
    pg_loss = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(seed)).requires_grad_()
    batch = {"log_probs": train, "rollout_log_probs": rollout, "loss_masks": masks}
    return pg_loss, batch | {"total_lengths": [n + 5 for n in LENGTHS], "response_lengths": LENGTHS}


def expected(seed: int, sigma: float, settings: CorrectionSettings | None = None) -> Correction:
    """fp8plan's own correction of the same tensors, packed."""
    train, rollout, masks = (torch.cat(x) for x in responses(seed, sigma))
    return correct(pack(train, rollout, masks, LENGTHS), settings)


ARGS = SimpleNamespace(use_tis=True)
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
    assert float(figures["fp8plan/threshold_tis"].unique()) == 2.0
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


def megatron(patch: pytest.MonkeyPatch, cp: int = 1, tp_rank: int = 0) -> None:
    """Megatron's parallel state, as far as it is asked for."""
    frameworks.install(
        patch, micro_batches.MEGATRON,
        model_parallel_is_initialized=lambda: True,
        get_data_parallel_group=lambda with_context_parallel=False: None,
        get_tensor_model_parallel_rank=lambda: tp_rank,
        get_context_parallel_rank=lambda: 0,
        get_context_parallel_world_size=lambda: cp,
    )  # fmt: skip


def sequences(seed: int, sigma: float, weighted: bool = False) -> list[frameworks.LossInputs]:
    chance = torch.Generator().manual_seed(seed)
    found = []
    for train, rollout, mask in zip(*responses(seed, sigma), strict=True):
        weight = torch.rand(len(train), generator=chance) if weighted else None
        advantage = torch.randn(len(train), generator=chance)
        inputs = frameworks.LossInputs(train.requires_grad_(), rollout, None, advantage, mask.bool(), weight)
        found.append(inputs)
    return found


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
    assert figures["fp8plan/threshold_tis"].tolist() == [2.0] * len(given)
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
    own = correct(pack(batch["old_action_log_probs"], batch["rollout_action_logprobs"], batch["loss_mask"]))
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
    assert found[:3] == [2.0] * 3  # the first wild step is still corrected with what calm ones led to
    assert 1 < found[5] < found[3] < 2.0
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
    assert [row["thresholds"]["tis"] for row in reader.rows] == pytest.approx(found)
    assert [row["step"] for row in reader.rows] == list(range(1, len(spread) + 1))
    assert all(row["metrics"]["fp8plan/k3_robust"] >= 0 for row in reader.rows)


def test_micro_batches_of_a_step_add_up_to_the_whole_batch() -> None:
    batches = running(HookSettings())
    for seed in (0, 1):
        batches.correct(*(torch.cat(x) for x in responses(seed, WILD)), lengths=LENGTHS)
    optimiser_steps()
    optimiser_steps()  # of another model: nothing came in between
    step = Monitor().step(*both(0, WILD), lengths=LENGTHS * 2)
    assert batches.last is not None
    assert batches.monitor.steps == 1
    assert batches.last.thresholds == step.thresholds
    for name, value in step.metrics.items():
        if name != "fp8plan/monitor_s" and value is not None:
            assert batches.last.metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"C": 2.0}, "have C; allowed: level, mode, tis, band"),
        ({"tis": "two"}, "tis is 'two'; allowed: a number"),
        ({"tis": 0.5}, "tis begins at 0.5; allowed: above 1"),
        ({"level": "word"}, "level is 'word'; allowed: token, sequence, geometric"),
        ({"level": None}, "level is None; allowed: text"),
        ({"mode": "mis", "band": [2.0, 0.5]}, "band is (2.0, 0.5); allowed: (low, high)"),
        ({"thresholds": "constant", "target_kl": 0.01}, "target_kl with constant thresholds"),
        ({"plan": "no.json"}, "fp8plan plan MODEL --gpu GPU --json plan.json"),
        ([1], "are a list; allowed: a JSON object"),
        ("{", "hook's settings in"),
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
from fp8plan.integrations.micro_batches import running, stop
from fp8plan.integrations.settings import HookSettings
rank, folder = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                               timeout=timedelta(seconds=60))
some = torch.nn.Parameter(torch.ones(1))
some.grad = torch.ones(1)
optimiser = torch.optim.SGD([some])
chance = torch.Generator().manual_seed(rank)
shared = running(HookSettings(run_file=folder + "/shared.jsonl"))
alone = running(HookSettings(run_file=folder + "/alone.jsonl", share=False))
found = []
for step in range(4):
    for _ in range(1 + rank):  # ranks may have different numbers of micro-batches
        train = -torch.rand(400, generator=chance)
        rollout = train + (1.0 if rank else 0.01) * torch.randn(400, generator=chance)
        both = [one.correct(train, rollout, lengths=[400]).settings.thresholds.tis for one in (shared, alone)]
    optimiser.step()
    found.append(both)
stop()
print(json.dumps(found))
distributed.destroy_process_group()
"""


def test_ranks_share_their_statistics_unless_they_are_told_not_to(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    one, other = (json.loads(rank.communicate(timeout=120)[0]) for rank in ranks)
    assert [x[0] for x in one] == [x[0] for x in other]  # shared
    assert one[-1][0] < 2.0  # by rank 1's mismatch
    assert [x[1] for x in one] == [2.0] * 4  # alone: rank 0 sees no mismatch
    assert other[-1][1] < 2.0
    rows = {}
    for name in ("shared", "alone"):
        reader = RunReader(tmp_path / f"{name}.jsonl")
        reader.read()
        rows[name] = [row["metrics"]["fp8plan/tokens"] for row in reader.rows]
    assert rows == {"shared": [1200] * 4, "alone": [400] * 4}


def test_hooks_import_without_torch_and_without_the_frameworks() -> None:
    code = """
import sys
from fp8plan.integrations import prime_rl, skyrl, slime
loaded = {"torch", "slime", "prime_rl", "skyrl", "megatron", "ray"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)
