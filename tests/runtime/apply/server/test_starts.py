"""Which engines take the backend: experts in FP8 do; what could not be kept right is refused at the start."""

from __future__ import annotations

from typing import Any

import pytest
from native_client import InProcess, digests_of, ended, engine_of, send, trainer_of, without_cuda
from tiny_models import started, weights

from fp8plan.errors import ConfigError

pytestmark = pytest.mark.vllm


def test_experts_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's engine leaves the router in BF16. vLLM's own name for blockwise FP8 quantises it, too."""
    with started("moe", "b", "fp8_block") as engine:
        expected = engine.llm.collective_rpc("fp8plan_digests")[0]["ok"]
        settings = {name: engine.launch.kwargs[name] for name in ("quantization", "quantization_config")}
    llm = engine_of("moe", **settings)
    try:
        with without_cuda():
            trainer = trainer_of(InProcess(llm))
            send(trainer, weights("moe", "a"))
            assert digests_of(llm) != expected
            send(trainer, weights("moe", "b"))
            assert digests_of(llm) == expected
    finally:
        ended(llm)


def test_an_fp8_kv_cache_needs_the_part_that_measures_its_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with pytest.raises(ConfigError, match=r"only fp8plan's part of the server .* with VLLM_PLUGINS=fp8plan"):
        engine_of("dense", kv_cache_dtype="fp8")
    monkeypatch.setenv("VLLM_PLUGINS", "fp8plan,fp8plan_cpu_kernels")
    llm = engine_of("dense", kv_cache_dtype="fp8")  # no server, and so no front end
    try:
        with pytest.raises(ConfigError, match=r"which would stay at 1.0; start `vllm serve`"):
            llm.start_weight_update()
    finally:
        ended(llm)


@pytest.mark.parametrize(
    ("settings", "words"), [({"dtype": "float32"}, "the model runs as torch.float32; allowed: --dtype bfloat16")]
)
def test_an_engine_that_cannot_be_synced_so_does_not_start(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_of("dense", **({"quantization": None} | settings))
