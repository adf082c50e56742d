"""The loop of the host that a shipped profile was calibrated on, for rollouts of the time before hosts were timed."""

from __future__ import annotations

from functools import cache

from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import profile_path, profiles_path
from fp8plan.model.profile.profile import HOST_LOOP, Profile


@cache
def own_loop_s(gpu: str, engine_version: str) -> float | None:
    """Seconds as in RolloutRecord.host_loop_s; None if the profile's host was not timed."""
    path = profile_path(profiles_path(), find_gpu(gpu).name, engine_version)
    own: float | None = Profile.from_json(path.read_text(encoding="utf-8")).coefficients.get(HOST_LOOP)
    return own
