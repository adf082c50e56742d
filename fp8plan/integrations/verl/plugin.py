"""The entry point of group verl.plugins: puts fp8plan's names where verl looks for a rollout and for a trainer.

verl loads this module at every `import verl`, in all its processes, even if fp8plan is not used. So importing it
imports nothing of verl. A name is registered once verl itself has imported the registry, and its class is imported
when verl takes it. Errors, as with another verl, are raised then: verl logs those of a loading plugin at level DEBUG.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.integrations.verl.name import NAME

logger = logging.getLogger(__name__)


def install() -> None:
    """Register with the registries that verl has imported, and with the others as soon as it imports them."""
    for name, register in REGISTRIES.items():
        if name in sys.modules:
            _registered(register, sys.modules[name])
    if not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport())


class AfterImport(MetaPathFinder):
    """Registers with each of REGISTRIES as soon as it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        register = REGISTRIES.get(fullname)
        spec = None if register is None else PathFinder.find_spec(fullname, path, target)
        if register is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            _registered(register, module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def _registered(register: Callable[[Any], None], module: ModuleType) -> None:
    """Register with a module. A failure is only a warning, so that a verl without fp8plan still runs."""
    try:
        register(module)
    except Exception as error:
        logger.warning(
            "fp8plan does not know this verl (%s: %s), so rollout.name=%s will not be found; type: "
            "pip install 'fp8plan[verl]'",
            module.__name__,
            error,
            NAME,
        )


def _client(module: Any) -> None:
    """Let verl's own client of a vLLM server, in each of the trainer's workers, use fp8plan's server."""
    module._ROLLOUT_REGISTRY[NAME, "async"] = module._ROLLOUT_REGISTRY["vllm", "async"]


def _replica(module: Any) -> None:
    def load() -> Any:
        from fp8plan.integrations.verl.server import PlannedReplica

        return PlannedReplica

    module.RolloutReplicaRegistry.register(NAME, load)


def _configurations(module: Any) -> None:
    module.validate_config = partial(validated, module.validate_config)


def validated(check: Callable[..., None], config: Any, *args: Any, **more: Any) -> None:
    """Check a configuration as verl's `check` does before it starts Ray.

    Raises ConfigError for fp8plan's rollouts with verl's legacy trainer, which has no plan for them.
    """
    use_v1 = config.trainer.get("use_v1")
    if config.actor_rollout_ref.rollout.name == NAME and not use_v1:
        raise ConfigError(
            f"rollout.name={NAME} with trainer.use_v1={use_v1}, verl's legacy trainer, which fp8plan does not extend; "
            "type trainer.use_v1=True, or actor_rollout_ref.rollout.name=vllm, without fp8plan"
        )
    check(config, *args, **more)


def _trainers(module: Any) -> None:
    registry = module.trainer_base.TRAINER_REGISTRY
    registry.update({mode: partial(trainer_of, stock) for mode, stock in registry.items()})


def trainer_of(stock: Any, config: Any) -> Any:
    """verl's trainer of a mode; with fp8plan's rollouts, the planned one. stock: its class; config: verl's"""
    if config.actor_rollout_ref.rollout.name != NAME:
        return stock(config=config)
    from fp8plan.integrations.verl.settings import settings_in

    if settings_in(config).dry_run:
        from fp8plan.integrations.verl.dry_run import DryRun

        return DryRun(config)
    from fp8plan.integrations.verl.trainer import planned_class

    return planned_class(stock)(config=config)


REGISTRIES: Final[dict[str, Callable[[Any], None]]] = {
    "verl.workers.rollout.base": _client,
    "verl.workers.rollout.replica": _replica,
    "verl.trainer.ppo.v1": _trainers,
    "verl.utils.config": _configurations,
}

install()
