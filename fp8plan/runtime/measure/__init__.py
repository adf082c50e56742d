"""Measurements on a real GPU: what profiles are fitted to and predictions are checked against."""
