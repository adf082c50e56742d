"""A server that is started with the settings of `vllm-serve`, and what the doctor reads from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_models import checkpoint, cpu_plan
from vllm_server import serving

import fp8plan

pytestmark = pytest.mark.vllm

# What the doctor asks a server through, and the part that lets any CPU run FP8; a plan's engine needs neither.
SEEN = "VLLM_SERVER_DEV_MODE=1 VLLM_PLUGINS=fp8plan"


@pytest.mark.slow
def test_the_doctor_reads_what_was_planned() -> None:
    plan = replace(cpu_plan("fp8_block+fp8_kv"), model=str(checkpoint("dense", "a")))
    command = plan.emit("vllm-serve").splitlines()[0]
    with serving(f"{SEEN} {command}") as server:
        found = fp8plan.doctor(server.url, precision="fp8_block+fp8_kv").observed
        print(found.runs, found.facts, found.ranks)
    assert 0
