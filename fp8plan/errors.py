"""The errors of fp8plan. Every message has the given value, the allowed ones, and the words to type."""

import sys
import warnings
from collections.abc import Sequence


class Fp8PlanError(Exception):
    """Base of all errors raised on purpose by fp8plan. The command line prints it and exits with 2."""


class ConfigError(Fp8PlanError, ValueError):
    """An argument, a file, or a combination of them that cannot be used."""


class ProfileError(Fp8PlanError, LookupError):
    """A profile is missing, is for another engine version, or lacks a kernel."""


class CapacityError(Fp8PlanError, ValueError):
    """The model does not fit the GPU, or one request can never fit the KV cache."""


class SyncError(Fp8PlanError, RuntimeError):
    """New weights did not arrive. The message names the cause, and the weights that serve now."""


class NotServingError(SyncError):
    """The engine refuses to generate, because its weights are a mixture of old and new ones, or it has died."""


class LostEngineError(SyncError):
    """The engine cannot be used any more. The next sync starts another one; after shutdown(), from_plan does."""


def text_of(error: BaseException) -> str:
    """Return an error's message, with its kind unless fp8plan raised it."""
    return str(error) if isinstance(error, Fp8PlanError) else f"{type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop, or its kind if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def some(names: Sequence[str]) -> str:
    """Return the first names for a message, and how many more they are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def warn(text: str) -> None:
    """Warn of a problem that must not stop training."""
    try:
        warnings.warn(f"fp8plan: {text}", RuntimeWarning, stacklevel=2)
    except RuntimeWarning:  # a filter that turns warnings into errors must not stop training, either
        print(f"fp8plan: {text}", file=sys.stderr)
