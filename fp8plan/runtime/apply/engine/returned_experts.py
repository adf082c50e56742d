"""The experts that each token went to, as outputs of vLLM's: which engines return them.

An output of vLLM has them in `outputs[j].routed_experts`, once it has ended: a numpy array (tokens, layers, experts per
token), uint8, or uint16 above 256 experts. The tokens are the prompt's and the response's without the last one, which
was never an input; `SamplingParams.routed_experts_prompt_start` leaves the first ones out. The layers are all hidden
layers. Those without experts have zeros. A request that was aborted before its first token has None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.configs.fields import NESTED, Fields
from fp8plan.model.limits import EngineLimits

OPTION: Final = "enable_return_routed_experts"  # vLLM's, and a field of EngineLimits


def refuse_dense(limits: EngineLimits, config: Mapping[str, Any], model: str) -> None:
    """Raise ConfigError for limits with returned experts and a model without experts. config: its config.json"""
    if not limits.enable_return_routed_experts:
        return
    levels = [config, *(config[name] for name in NESTED if isinstance(config.get(name), Mapping))]
    if not any(Fields(level, model).value("num_experts") for level in levels):
        raise ConfigError(f"{OPTION} is True, and {model} has no experts; leave it out")


def refuse_request(routed_experts: bool, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError if experts are asked of a running engine that returns none.

    routed_experts: argument of generate
    facts:          a worker's (apply.worker.facts)
    """
    if not routed_experts:
        return
    if not facts["experts"]:
        raise ConfigError("routed_experts is True, and the model has no experts; leave it out")
    if not facts["routed_experts"]:
        raise ConfigError(
            f"routed_experts is True, and the engine was started without; type: from_plan(plan, ..., {OPTION}=True)"
        )
