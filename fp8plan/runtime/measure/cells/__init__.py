"""Lists of rollouts to measure."""
