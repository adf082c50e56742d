"""The workload that the options of `fp8plan plan` ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from fp8plan.cli.app import given
from fp8plan.errors import ConfigError

if TYPE_CHECKING:
    from fp8plan.model.workload import Workload

# The rollout of DAPO (arXiv 2503.14476) on one GPU.
PROMPTS: Final = 32
SAMPLES: Final = 16
RESPONSES: Final = "lognormal:mean=6000,sigma=0.9,max=20480"


def asked_for(
    recorded: Path | None,
    prompts: int | None,
    samples: int | None,
    prompt_lengths: str | None,
    response_lengths: str | None,
    seed: int | None,
) -> tuple[Workload, list[str]]:
    """The workload of the options, each None where it was not given, and notes.

    Raises ConfigError for a recorded rollout beside any other option, and as the workload's own readers do.
    """
    from fp8plan.model.recorded import recorded_workload
    from fp8plan.model.workload import Workload, parse_both_lengths

    if recorded is not None:
        others = given(
            prompts=prompts,
            samples=samples,
            prompt_lengths=prompt_lengths,
            response_lengths=response_lengths,
            seed=seed,
        )
        if others:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in others)
            raise ConfigError(f"both --workload and {names} are given; --workload {recorded} says all of them")
        return recorded_workload(recorded)
    prompt_tokens, response_tokens, notes = parse_both_lengths(
        prompt_lengths, RESPONSES if response_lengths is None else response_lengths
    )
    counts = (PROMPTS if prompts is None else prompts, SAMPLES if samples is None else samples)
    return Workload(*counts, prompt_tokens, response_tokens, seed or 0), notes
