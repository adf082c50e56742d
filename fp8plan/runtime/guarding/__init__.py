"""The parts of fp8plan.runtime.guard: what was seen, what was predicted, why they differ, and what to do about it."""
