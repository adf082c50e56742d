"""Peers' own tests of rollout correction, asked of fp8plan's correction through adapters: verl, SkyRL, prime-rl."""
