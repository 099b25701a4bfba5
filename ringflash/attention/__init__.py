"""Attention over a sequence that is sharded over ranks; start with README.md in this folder."""
