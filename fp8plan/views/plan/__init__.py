"""A plan as figure and page."""
