"""Rollouts that verl, TRL and SkyRL logged, as rollout records: `fp8plan import`."""
