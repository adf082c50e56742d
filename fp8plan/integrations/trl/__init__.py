"""TRL's GRPOTrainer with a plan.

from fp8plan.integrations.trl import GRPOTrainer

trainer = GRPOTrainer(model, reward_funcs, args, train_dataset, plan="auto")
"""

from fp8plan.errors import ConfigError

try:
    from fp8plan.integrations.trl.trainer import GRPOTrainer
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "trl":
        raise
    raise ConfigError("TRL is not installed; type: pip install 'fp8plan[trl]'") from error

__all__ = ["GRPOTrainer"]
