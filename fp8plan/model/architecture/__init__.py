"""The parts that a model is made of, read from its config.json."""

from fp8plan.model.architecture.parts import Experts, Linear
from fp8plan.model.architecture.shape import ModelShape, bundled_models

__all__ = ["Experts", "Linear", "ModelShape", "bundled_models"]
