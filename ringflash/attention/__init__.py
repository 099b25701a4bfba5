"""Attention over a sequence that is sharded over ranks. README.md in this folder follows one call."""
