"""The tolerance by which `ringflash verify` judges is the one that the tests judge by."""

from ringflash.testing.tolerance import RTOL_FP64, SEQUENCE_DIM, Ratio, assert_close, assert_within, measure, ratios

__all__ = ["RTOL_FP64", "SEQUENCE_DIM", "Ratio", "assert_close", "assert_within", "measure", "ratios"]
