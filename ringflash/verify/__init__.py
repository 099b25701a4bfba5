"""The command `ringflash verify`: does a model train over the ring as it does on one device? See docs/verify.md.

    command -> target (model and data) -> session: observe cp=N, cp=1, cp=1 in fp64 -> compare -> probe, diagnosis
    -> report

`ringflash.testing` has the tolerance and the dense attention, which the tests share.
"""

from ringflash.verify.target import Training

__all__ = ["Training"]
