"""The dense attention against which `ringflash verify` compares is the tests' oracle."""

from ringflash.testing.dense import attention, visible

__all__ = ["attention", "visible"]
