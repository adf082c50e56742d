"""TRL's GRPOTrainer with a plan, and the plan alone.

from fp8plan.integrations.trl import GRPOTrainer, planned

planned(args, train_dataset, model="Qwen/Qwen3-8B", gpu="h200")
trainer = GRPOTrainer(model, reward_funcs, args, train_dataset, plan="auto")
"""

from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError
from fp8plan.integrations.trl.request import planned

if TYPE_CHECKING:
    from fp8plan.integrations.trl.trainer import GRPOTrainer

__all__ = ["GRPOTrainer", "planned"]

if not TYPE_CHECKING:  # a plan alone needs neither vLLM nor TRL's trainers

    def __getattr__(name: str) -> Any:
        if name != "GRPOTrainer":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from fp8plan.integrations.trl.trainer import GRPOTrainer
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "trl":
                raise
            raise ConfigError(
                f"TRL is not installed, or is one that fp8plan does not know ({error}); "
                "type: pip install 'fp8plan[trl]'"
            ) from error
        return GRPOTrainer
