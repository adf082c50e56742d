"""Seconds of one engine step from its shapes: a file per kind of kernel, put together in `step`."""
