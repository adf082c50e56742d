"""Words of a small plan, typed after `fp8plan`."""

from __future__ import annotations

MODEL = "Qwen/Qwen3-0.6B"
SMALL = ["--prompts", "2", "--samples", "2", "--prompt-lengths", "fixed:16", "--response-lengths", "fixed:32"]
PLAN = ["plan", MODEL, "--gpu", "h200", *SMALL]  # a later option of the same name wins
