"""A trainer's configuration as the words of `fp8plan plan`. Options that are typed beside it go before."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, Any

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.model.distributions import is_trace
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.workload import Workload
from fp8plan.options import OF_TRAINER, Option, Words
from fp8plan.packages import package


@dataclass(frozen=True)
class TrainerConfig:
    """A trainer's configuration, of which a plan's request is made."""

    grpo_config: Annotated[
        str | None,
        Option(
            OF_TRAINER,
            "a GRPOConfig of TRL, and perhaps its dataset: names in a file, of objects or of functions that make them",
            metavar="FILE.py:ARGS[,DATASET]",
        ),
    ] = None
    verl_config: Annotated[
        Path | None,
        Option(OF_TRAINER, "verl's composed configuration: main_ppo ... --cfg job > FILE.yaml", metavar="FILE.yaml"),
    ] = None


def configured(words: Words) -> Words:
    """The words of a plan of the configuration and of the options beside it.

    Raises ConfigError for two configurations, and for one that cannot be read, or that no plan supports.
    """
    from fp8plan.integrations.request import words_of

    config = TrainerConfig(**words[TrainerConfig])
    if config.grpo_config is not None and config.verl_config is not None:
        raise ConfigError("both --grpo-config and --verl-config are given; allowed: one of them")
    if config.grpo_config is not None:
        rollouts, words = _of_trl(config.grpo_config, words)
    else:
        rollouts = _of_verl(config.verl_config)
    made = words_of(rollouts, words)
    work = dict(made[Workload])
    if is_trace(str(words[Workload].get("response_lengths"))) and "prompt_lengths" not in words[Workload]:
        work.pop("prompt_lengths", None)  # the trace may have them
    return {**made, Workload: work}


def _of_verl(file: Path | None) -> Any:
    """The rollouts of verl's configuration."""
    package("omegaconf", "--verl-config", "pip install omegaconf")
    from fp8plan.integrations.verl.settings import rollouts_in

    return rollouts_in(file)


def _of_trl(source: str, words: Words) -> tuple[Any, Words]:
    """The rollouts of a GRPOConfig, and the words with the prompt lengths of its dataset, if there is one."""
    from fp8plan.integrations.trl.request import dataset_lengths, rollouts_of

    args, *dataset = _named(source)
    if not hasattr(args, "max_completion_length"):
        raise ConfigError(
            f"--grpo-config {source} names a {type(args).__name__}; allowed: a GRPOConfig, or a function that makes one"
        )
    rollouts = rollouts_of(args)
    model, typed = words[PlanRequest].get("model"), words[Workload]
    if not dataset or model is None or "prompt_lengths" in typed:
        return rollouts, words
    return rollouts, {**words, Workload: {**dataset_lengths(args, dataset[0], model), **typed}}


def _named(source: str) -> list[Any]:
    """The objects that FILE.py:NAME,NAME names. A function is called without arguments.

    Raises ConfigError for a file that is missing or raises an error, and for a name that it does not have.
    """
    from fp8plan.integrations.trl.request import bf16_without_gpu

    file, _, names = source.rpartition(":")
    if not file or not names:
        raise ConfigError(f"--grpo-config is {source!r}; allowed: FILE.py:ARGS or FILE.py:ARGS,DATASET")
    spec = spec_from_file_location(Path(file).stem, file)
    if not Path(file).is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--grpo-config is {source!r}, and {file} is no Python file; allowed: FILE.py:ARGS")
    module = module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look there
    sys.path.insert(0, str(Path(file).parent))  # as for a script
    try:
        with bf16_without_gpu():
            spec.loader.exec_module(module)
            known = [getattr(module, name) for name in names.split(",")]
            return [value() if callable(value) else value for value in known]
    except Fp8PlanError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--grpo-config {source}: {error}; type: pip install 'fp8plan[trl]', and what else {file} imports"
        ) from error
    except Exception as error:
        raise ConfigError(f"--grpo-config {source}: {type(error).__name__}: {error}; mend {file}") from error
    finally:
        sys.path.remove(str(Path(file).parent))
