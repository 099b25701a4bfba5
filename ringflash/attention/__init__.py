"""Attention over a sequence that is spread over ranks; README.md beside this file is the way in."""
