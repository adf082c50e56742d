"""New weights into the live engine: the trainer's side."""
