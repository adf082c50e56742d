"""Write the checkpoint of a policy."""

from __future__ import annotations

from benchmarks.learning.policies.make import main

main()
