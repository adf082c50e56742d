"""Syncs of new weights into a live engine: the trainer's side."""
