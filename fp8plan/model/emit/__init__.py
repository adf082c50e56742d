"""Settings for others' programs: vLLM and trainers, with fp8plan and without."""
