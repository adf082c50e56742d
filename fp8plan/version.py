"""The version of the package, where every module may ask for it."""

__version__ = "0.1.0"
