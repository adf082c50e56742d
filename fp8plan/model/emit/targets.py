"""The writer of each target's settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fp8plan.model.emit.job import Job
from fp8plan.model.emit.nemo_rl import emit_nemo_rl
from fp8plan.model.emit.openrlhf import emit_openrlhf
from fp8plan.model.emit.plain_vllm import emit_vllm, emit_vllm_serve
from fp8plan.model.emit.prime_rl import emit_prime_rl
from fp8plan.model.emit.skyrl import emit_skyrl
from fp8plan.model.emit.slime import emit_slime
from fp8plan.model.emit.trl import emit_trl
from fp8plan.model.emit.verl import emit_verl, emit_verl_stock

EMITTERS: Final[dict[str, Callable[[Job], str]]] = {
    "vllm": emit_vllm,
    "vllm-serve": emit_vllm_serve,
    "verl": emit_verl,
    "verl-stock": emit_verl_stock,
    "trl": emit_trl,
    "nemo-rl": emit_nemo_rl,
    "skyrl": emit_skyrl,
    "prime-rl": emit_prime_rl,
    "slime": emit_slime,
    "openrlhf": emit_openrlhf,
}
