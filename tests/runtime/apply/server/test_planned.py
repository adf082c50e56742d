"""A server that is started with the settings of `vllm-serve`, and what the doctor reads from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_models import checkpoint, cpu_plan
from vllm_server import serving

import fp8plan

pytestmark = pytest.mark.vllm

# The doctor asks a server through these. They also load the part that runs FP8 on any CPU.
SEEN = "VLLM_SERVER_DEV_MODE=1 VLLM_PLUGINS=fp8plan"


@pytest.mark.slow
def test_the_doctor_reads_what_was_planned() -> None:
    plan = replace(cpu_plan("fp8_block+fp8_kv", enable_prefix_caching=False), model=str(checkpoint("dense", "a")))
    command = plan.emit("vllm-serve").splitlines()[0]
    with serving(f"{SEEN} {command}") as server:
        found = fp8plan.doctor(server.url, precision="fp8_block+fp8_kv")
        config = server.get("/server_info?config_format=json")["vllm_config"]
        other = fp8plan.doctor(server.url, precision="fp8_kv")
    (told,) = (one for one in found.findings if one.check == "precision")
    assert (told.state.value, told.says) == ("ok", "quantization fp8_per_block, KV cache fp8")
    assert found.faults == ()
    assert [fault.fault for fault in other.faults] == ["wrong_precision"]
    facts, limits = found.observed.facts, plan.setup().limits
    assert facts["prefix_caching"] is limits.enable_prefix_caching is False
    assert (facts["enforce_eager"], facts["logprobs_mode"]) == (limits.enforce_eager, "processed_logprobs")
    scheduler, model = config["scheduler_config"], config["model_config"]
    assert scheduler["max_num_seqs"] == limits.max_num_seqs
    assert scheduler["max_num_batched_tokens"] == limits.max_num_batched_tokens
    assert model["max_model_len"] == limits.max_model_len
    assert config["cache_config"]["block_size"] == limits.block_size
    assert model["quantization_config"]["ignore"] == plan.vllm_kwargs()["quantization_config"]["ignore"]
