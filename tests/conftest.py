"""Memory of all tests begins as NaN."""

from tests.helpers.nan_memory import fill_new_memory

fill_new_memory()
