"""The mismatch to expect of a precision: theory, fit to observations, and the budget it is held against."""
