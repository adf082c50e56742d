"""A run as its Monitor recorded it: terminal, figures, page."""
