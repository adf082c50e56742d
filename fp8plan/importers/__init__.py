"""Rollouts that verl, TRL, SkyRL or any other program logged, as rollout records: `fp8plan import`."""
