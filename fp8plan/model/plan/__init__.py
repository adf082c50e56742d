"""Planning: every candidate predicted, one chosen, and the reasons."""
