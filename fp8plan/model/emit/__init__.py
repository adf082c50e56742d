"""Settings for others' programs: vLLM, verl, TRL."""
