"""What holds for all tests."""

from tests.helpers.nan_memory import fill_new_memory

fill_new_memory()
