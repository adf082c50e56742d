"""Rollouts that verl, TRL and SkyRL logged, as rollout records: `fp8plan import`.

A reader knows one trainer's files (verl, trl, skyrl), `figures` what it logs in numbers, `tokens` counts the tokens of
logged text, and `records` puts them together.
"""
