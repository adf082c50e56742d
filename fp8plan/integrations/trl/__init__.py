"""TRL's GRPOTrainer with a plan, a mixin for other trainers of TRL's, and the plan alone.

from fp8plan.integrations.trl import GRPOTrainer, planned

planned(args, train_dataset, model="Qwen/Qwen3-8B", gpu="h200")
trainer = GRPOTrainer(model, reward_funcs, args, train_dataset, plan="auto")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.integrations.trl.request import planned
from fp8plan.packages import INSTALL

if TYPE_CHECKING:
    from fp8plan.integrations.trl.mixin import Planned
    from fp8plan.integrations.trl.trainer import GRPOTrainer

__all__ = ["GRPOTrainer", "Planned", "planned"]

if not TYPE_CHECKING:  # a plan alone needs neither vLLM nor TRL's trainers
    MODULES = {"GRPOTrainer": "trainer", "Planned": "mixin"}
    OF_VLLM = ("vllm", "requests")  # requests comes with vLLM

    def __getattr__(name: str) -> Any:
        if name not in MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = import_module(f"{__name__}.{MODULES[name]}")
        except ImportError as error:
            package = (error.name or "").partition(".")[0]
            if package == "trl":
                raise ConfigError(
                    f"TRL is not installed, or is one that fp8plan does not know ({error}); "
                    "type: pip install 'fp8plan[trl]'"
                ) from error
            if package in OF_VLLM:
                raise ConfigError(
                    f"{name} needs vLLM, which is not installed ({error}); type: {INSTALL}. For the table alone, call "
                    "fp8plan.integrations.trl.planned"
                ) from error
            raise
        return getattr(module, name)
