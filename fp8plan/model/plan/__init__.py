"""Every candidate predicted, one chosen, and why."""
