"""Attention layers of any model, run over a ring of ranks without a change in their code.

`wrapper` swaps the classes of the layers, `interception` replaces torch's attention while they run, and `check`
compares the wrapped module with the original.
"""

from ringflash.wrap.check import check_wrapped
from ringflash.wrap.wrapper import wrap_attention

__all__ = ["check_wrapped", "wrap_attention"]
