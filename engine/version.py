"""The version, for whoever must not import the package's root."""

__version__ = "0.1.0"
