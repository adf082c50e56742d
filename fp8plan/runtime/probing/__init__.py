"""Parts of `fp8plan probe`: prompts, the engine that samples, the reference that scores, intervals, the table's row."""
