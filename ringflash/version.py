"""Version of the package, which ranks compare before their first call."""

__version__ = "0.1.0"
