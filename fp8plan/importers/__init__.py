"""Rollouts that verl, TRL and SkyRL logged, as rollout records: `fp8plan import`.

A reader (verl, trl, skyrl) knows one trainer's files, and `figures` its logged numbers. `records` counts the tokens of
logged text, and makes the records.
"""
