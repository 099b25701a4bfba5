"""Ring attention for any model, without a change to its code.

wrapper         wrap_attention: swaps the classes of layers, so that their forwards run inside an interception
interception    replaces torch's attention while a layer runs, and rejects calls that it cannot replace
check           check_wrapped: compares the wrapped module with itself on the whole sequence
"""

from ringflash.wrap.check import check_wrapped
from ringflash.wrap.wrapper import disable_ring, wrap_attention

__all__ = ["check_wrapped", "disable_ring", "wrap_attention"]
