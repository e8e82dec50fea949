"""The version, where torch-free code and the engine can both read it."""

__version__ = "0.1.0"
