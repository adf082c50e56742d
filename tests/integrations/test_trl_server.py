"""TRL's server mode with a plan: a real GRPO run on the CPU against a real `vllm serve` with an FP8 KV cache.

The client is TRL's own, but for NCCL: its broadcasts go through the store of vLLM's rendezvous.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import requests
from plans import predicted
from test_trl_planned import rloo
from tiny_models import VOCABULARY, cpu_plan
from tiny_models import started as engine_started
from trl_runs import COMPLETION, PROMPT, ended, logged, model, started, trainer_of
from vllm_server import Server, free_port, serving

from fp8plan.errors import ConfigError, SyncError
from fp8plan.model.emit.trl import server_command
from fp8plan.model.plan.plan import Plan
from fp8plan.model.precision import PRESETS
from fp8plan.runtime.watch.guard.fallback import Action
from fp8plan.runtime.watch.monitor.sinks import JsonLines

pytestmark = [pytest.mark.trl, pytest.mark.vllm]

STEPS = 16  # most is learnt after the seventh: after 8 the reward was up by 0.1 to 0.5, and once by less than 0.05


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Started by the very line that an error would say."""
    setup = replace(cpu_plan("fp8_kv").setup(), model=model())
    with serving(server_command(setup)) as found:
        yield found


def of(server: Server, **settings: Any) -> dict[str, Any]:
    """A trainer's settings for a server."""
    where = {"vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_group_port": free_port()}
    return where | {"plan": "auto", "choice": "fp8_kv"} | settings


@dataclass
class Run:
    """Facts of a run.

    syncs: for each sync, (weights version, samples compared, source of KV scales)
    """

    plan: Plan
    history: list[dict[str, Any]]
    syncs: list[tuple[int, int, str | None]]
    digests: list[dict[str, int]]
    scales: dict[str, Any]
    reported: dict[str, Any]
    policy: Path
    folder: Path

    def logged(self, name: str) -> list[float]:
        return [row[name] for row in self.history if name in row]


@pytest.fixture(scope="module")
def run(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Run:
    from transformers import AutoTokenizer

    from fp8plan.integrations.trl.server import PlannedServer

    folder, seen, sync = tmp_path_factory.mktemp("trl"), [], PlannedServer.sync_weights
    sinks = [JsonLines(folder / "run.jsonl")]
    with (
        pytest.MonkeyPatch.context() as patch,
        started(folder, **of(server, max_steps=STEPS, sinks=sinks)) as trainer,
    ):

        def watched(self: PlannedServer) -> None:
            sync(self)
            assert self.report is not None
            seen.append((self.report.version, self.report.compared, self.report.kv_source))

        patch.setattr(PlannedServer, "sync_weights", watched)
        trainer.train()
        trainer.vllm_generation.sync_weights()  # of the last step, too
        report = trainer.vllm_generation.report
        trainer.model.bfloat16().save_pretrained(folder / "policy")
        AutoTokenizer.from_pretrained(model()).save_pretrained(folder / "policy")
        return Run(
            trainer.plan,
            trainer.state.log_history,
            seen,
            server.rpc("fp8plan_digests"),
            server.get("/fp8plan/status")["kv_scales"]["scales"],
            {"seconds": report.seconds, "scales": report.kv_scales},
            folder / "policy",
            folder,
        )


def test_another_trainer_takes_the_server_by_the_mixin(server: Server, tmp_path: Path) -> None:
    with ended(rloo(tmp_path, **of(server, max_steps=2))) as trainer:
        trainer.train()
        assert trainer.vllm_generation.report.kv_source == "the last sequences that were generated"
        assert len(trainer.rollout_engine.observation.response_lengths) == 32
        assert logged(trainer, "fp8plan/fp8_kv") == [1.0] * 2
        assert min(logged(trainer, "fp8plan/sync_compared")) > 0


def test_rollouts_by_fp8plans_route_are_trls(server: Server) -> None:
    from trl.generation.vllm_client import VLLMClient

    from fp8plan.integrations.trl.client import PlannedClient, sampling_of

    client, prompts = PlannedClient(base_url=server.url, connection_timeout=10), [[1, 2, 3], [5], [7, 8]]

    def answered(**more: Any) -> list[list[int]]:
        asked: dict[str, Any] = {"n": 2, "max_tokens": 12, "temperature": 0.9}
        asked["generation_kwargs"] = {"seed": 3, "ignore_eos": True} | more
        expected = VLLMClient.generate(client, prompts, **asked)
        assert client._rolled_out(prompts, sampling_of(prompts, **asked)) == expected
        found: list[list[int]] = expected["completion_ids"]
        return found

    whole = answered()
    assert [len(tokens) for tokens in whole] == [12] * 6
    token, (at, word) = whole[0][4], next((at, it) for at, it in enumerate(whole[2]) if it < VOCABULARY - 2)
    ended = answered(stop=[f"w{word}"], stop_token_ids=[token])
    assert len(ended[0]) <= 5
    assert len(ended[2]) <= at + 1
    assert all(tokens == full[: len(tokens)] for tokens, full in zip(ended, whole, strict=True))
    told = {"prompts": prompts, "sampling": {"seed": 5.0, "max_tokens": "3", "ignore_eos": 1, "stop_token_ids": [1]}}
    answer = requests.post(f"{server.url}/v1/fp8plan/rollout", json=told, timeout=60).json()
    assert [len(tokens) for tokens in answer["token_ids"]] == [3] * 3
    assert answer["finish_reasons"] == ["length"] * 3
    with pytest.raises(Exception, match=r"400, .*max_tokens must be at least 1, got -1"):
        client.generate(prompts, max_tokens=-1)
    with pytest.raises(Exception, match=r"400, .*a prompt has 250 tokens and max_tokens is 7; allowed: 256 of both"):
        client.generate([[1], [1] * 250], max_tokens=7)
    for told in (
        {"prompts": [[-1]]},
        {"prompts": [[1]], "max_tokens": 3},
        {"prompts": [[1]], "sampling": {"seed": "x"}},
    ):
        assert requests.post(f"{server.url}/v1/fp8plan/rollout", json=told, timeout=60).status_code == 400
    assert client.generate([[1]], max_tokens=2)["prompt_ids"] == [[1]]  # none of these has cost the engine


@pytest.mark.slow
def test_the_plan_is_made_for_the_servers_limits_and_the_trainers_batch(run: Run) -> None:
    assert (run.plan.gpu, run.plan.model) == ("cpu", model())
    assert (run.plan.workload["prompts"], run.plan.workload["samples"]) == (4, 8)
    assert (run.plan.workload["max_prompt_tokens"], run.plan.workload["max_response_tokens"]) == (PROMPT, COMPLETION)
    assert (run.plan.limits.max_model_len, run.plan.limits.max_num_seqs) == (256, 8)
    assert run.plan.limits.max_num_batched_tokens == 512


@pytest.mark.slow
def test_the_policy_learns_on_the_servers_rollouts(run: Run) -> None:
    rewards = run.logged("reward")
    assert len(rewards) == STEPS
    assert max(rewards[-4:]) > rewards[0] + 0.2  # 0.48 as a rule; batches, and so samples, depend on the load
    assert run.logged("fp8plan/fp8_kv") == [1.0] * STEPS
    assert run.logged("fp8plan/fp8_weights") == [0.0] * STEPS


@pytest.mark.slow
def test_each_sync_is_checked_and_measures_the_kv_scales(run: Run) -> None:
    versions = [version for version, *_ in run.syncs]
    assert versions == list(range(versions[0], versions[0] + STEPS + 1))
    assert all(compared > 0 for _, compared, _ in run.syncs)
    assert {source for *_, source in run.syncs[1:]} == {"the last sequences that were generated"}
    assert run.logged("fp8plan/sync_compared") == [float(compared) for _, compared, _ in run.syncs[:STEPS]]
    assert min(run.logged("fp8plan/sync_s")) > 0
    assert run.reported["seconds"]["total"] > run.reported["seconds"]["load"] > 0
    assert run.reported["scales"] == {
        layer: [found[part] for part in ("q", "k", "v")] for layer, found in run.scales.items()
    }


@pytest.mark.slow
def test_the_server_holds_the_policy_bit_for_bit(run: Run) -> None:
    with engine_started(run.policy, "", "fp8_kv") as engine:
        assert run.digests == [engine.llm.collective_rpc("fp8plan_digests")[0]["ok"]]


@pytest.mark.slow
def test_thresholds_and_metrics_are_those_of_colocated_mode(run: Run) -> None:
    assert all(abs(x - 1) < 0.1 for x in run.logged("sampling/importance_sampling_ratio/mean"))
    k3 = run.logged("fp8plan/k3_kl")
    assert k3[0] > 0  # later the policy may be so sure of a token that both log-probs are 0
    assert all(0 <= x < 0.03 for x in k3)  # at most 0.009 on three kinds of CPU
    for name in ("speed_ratio", "as_fast_as_predicted", "advice", "tokens_per_s", "predicted_tokens_per_s", "ess_raw"):
        assert len(run.logged(f"fp8plan/{name}")) == STEPS, name
    records = [json.loads(line) for line in (run.folder / "run.jsonl").read_text().splitlines()]
    bounds = run.logged("fp8plan/threshold_tis")
    assert bounds == [row["thresholds"]["tis"] for row in records]
    assert bounds[0] == run.plan.thresholds["token_tis"]
    assert {row["precision"] for row in records} == {"fp8_kv"}
    assert {len(row["rollout"]["response_lengths"]) for row in records if "rollout" in row} <= {32}


def refused(server: Server, match: str, folder: Path, **settings: Any) -> None:
    from fp8plan.integrations.trl import GRPOTrainer

    with pytest.raises(ConfigError, match=match):
        trainer_of(GRPOTrainer, folder, **of(server, **settings))


LINE = (
    r"VLLM_SERVER_DEV_MODE=1 VLLM_PLUGINS=fp8plan vllm serve .* --weight-transfer-config '{\"backend\": \"fp8plan\"}'"
)


def test_another_precision_is_an_error_with_the_line_to_type(server: Server, tmp_path: Path) -> None:
    what = rf"runs fp8_kv, and the plan is for bf16 \(choice='fp8_kv' takes .*--kv-cache-dtype auto .*{LINE[-48:]}"
    refused(server, what, tmp_path, choice="bf16")
    made = replace(cpu_plan("fp8_block+fp8_kv"), model=model(), choices=tuple(map(predicted, PRESETS)))
    what = r"runs fp8_kv, and the plan is for fp8_block\+fp8_kv.*--quantization online --quantization-config"
    refused(server, what, tmp_path, plan=made, choice=None)


def test_other_limits_are_an_error_with_the_line_to_type(server: Server, tmp_path: Path) -> None:
    made = replace(cpu_plan("fp8_kv", max_num_seqs=4), model=model())
    refused(server, rf"has max_num_seqs 8, and the plan 4; end it, and type: .*{LINE}", tmp_path, plan=made)


def test_another_backend_is_an_error_with_the_line_to_type(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8plan.integrations.trl.client import PlannedClient

    info = PlannedClient.get_server_info

    def nccl(self: PlannedClient) -> dict[str, Any]:
        return info(self) | {"weight_transfer_config": {"backend": "nccl"}}

    monkeypatch.setattr(PlannedClient, "get_server_info", nccl)
    refused(server, rf"has the weight-transfer backend nccl, and a plan needs.*type: .*{LINE}", tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(PlannedClient, "status", lambda self: None)
    refused(server, rf"was started without VLLM_PLUGINS=fp8plan.*type: .*{LINE}", tmp_path)


def test_a_server_that_is_not_there_is_trls_error(tmp_path: Path) -> None:
    from fp8plan.integrations.trl import GRPOTrainer

    nowhere = SimpleNamespace(url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(requests.ConnectionError, match="can't be reached"):
        trainer_of(GRPOTrainer, tmp_path, **of(nowhere, vllm_server_timeout=0.1))  # type: ignore[arg-type]


def test_what_the_server_does_not_take_is_one_error(server: Server, tmp_path: Path) -> None:
    with started(tmp_path, **of(server, max_steps=1)) as trainer:
        trainer.vllm_generation.sync_weights()
        sent = trainer.vllm_generation.announced()
        trainer.vllm_generation._sent = [sent[0], *sent[2:]]
        tensors = trainer.vllm_generation.tensors
        trainer.vllm_generation.tensors = lambda: (x for x in tensors() if x[0] != sent[1][0])
        with pytest.raises(SyncError, match=r"the server did not take the weights: .*missing: .*the old weights serve"):
            trainer.vllm_generation.sync_weights()


def test_a_step_down_is_said_with_the_line_to_type(
    server: Server, tmp_path: Path, warnings_of: Callable[[ModuleType], list[str]]
) -> None:
    from fp8plan.integrations.trl import server as module

    said = warnings_of(module)
    with started(tmp_path, **of(server, max_steps=1)) as trainer:
        trainer.rollout_engine.apply(Action.RECALIBRATE_KV)
        assert said == []
        trainer._apply(Action.KV_TO_BF16)
    (text,) = said
    assert "step down" in text
    assert "--kv-cache-dtype auto" in text
    assert "choice='bf16'" in text
