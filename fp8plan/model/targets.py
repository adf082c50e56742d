"""The programs that settings are written for, and what their engines can and need."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class Starts(NamedTuple):
    """The way in which a program starts engines.

    whole_blocks: it loads FP8 weights as a checkpoint in whole blocks
    sender:       the trainer that sends new weights, all in BF16; None: fp8plan does, or nobody
    measures:     who measures the scales of an FP8 cache after each sync: "fp8plan" or the "trainer"; "": nobody
    lacks:        precision that it cannot have -> the reason
    engine:       its engine
    over_http:    requests reach vLLM's own server over HTTP
    """

    whole_blocks: bool = False
    sender: str | None = None
    measures: str = ""
    lacks: Mapping[str, str] = MappingProxyType({})
    engine: str = "vLLM"
    over_http: bool = False


_NO_FP8: Final = "OpenRLHF hands vLLM no quantisation and no dtype of the cache; allowed: bf16"
_FP8_CACHE: Final = "NeMo RL has an FP8 cache beside FP8 weights alone; allowed: bf16, fp8_block, fp8_block+fp8_kv"

# Targets of settings. Behind vLLM's, verl's and TRL's with fp8plan stand programs without it.
TARGETS: Final = {
    "vllm": Starts(),
    "verl": Starts(True, "verl", "fp8plan"),
    "trl": Starts(False, "TRL", "fp8plan"),
    "vllm-serve": Starts(over_http=True),
    "verl-stock": Starts(True, "verl"),
    "nemo-rl": Starts(True, "NeMo RL", "trainer", {"fp8_kv": _FP8_CACHE}),
    "skyrl": Starts(False, "SkyRL"),
    "prime-rl": Starts(False, "prime-rl", over_http=True),
    "slime": Starts(True, "slime", engine="SGLang"),
    "openrlhf": Starts(False, "OpenRLHF", "", dict.fromkeys(("fp8_block", "fp8_kv", "fp8_block+fp8_kv"), _NO_FP8)),
}
