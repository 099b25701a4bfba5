"""Does a model train over the ring as it trains on one device? The command `ringflash verify`; docs/verify.md.

    command -> subject (model and data) -> session: observe cp=N, cp=1, cp=1 in fp64 -> compare -> probe, diagnosis
    -> report

`tolerance` and `dense` are the rule and the oracle that the tests use as well.
"""

from ringflash.verify.subject import Training

__all__ = ["Training"]
