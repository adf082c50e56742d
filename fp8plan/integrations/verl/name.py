"""The name of fp8plan's rollout in verl."""

from typing import Final

NAME: Final = "fp8plan"
