"""FP8 attention for compute capability 9.0; `ringflash_kernels.fp8_reference` is its specification.

implementation    the contract of `api`; imports the rest when a call can use it
quantise          q in e4m3 with scales; k and v as records, in one launch each
forward           out and lse of quantised q and records; continues (out, lse) of earlier hops
backward          dq, dk and dv, with one of three choices of products in e4m3
backward_keys     the kernel for both choices that have any
backward_operands operands of that kernel, and dq from its sums
tiles             tile shapes by head_dim, with the reason beside each odd value
"""
