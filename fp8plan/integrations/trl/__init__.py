"""TRL's GRPOTrainer with a plan, and a mixin for other trainers of TRL's.

from fp8plan.integrations.trl import GRPOTrainer

trainer = GRPOTrainer(model, reward_funcs, args, train_dataset, plan="auto")
"""

from fp8plan.errors import ConfigError

try:
    from fp8plan.integrations.trl.planned import Planned
    from fp8plan.integrations.trl.trainer import GRPOTrainer
except ImportError as error:
    if (error.name or "").partition(".")[0] != "trl":
        raise
    raise ConfigError(
        f"TRL is not installed, or is one that fp8plan does not know ({error}); type: pip install 'fp8plan[trl]'"
    ) from error

__all__ = ["GRPOTrainer", "Planned"]
