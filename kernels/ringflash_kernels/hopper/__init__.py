"""Our kernels for compute capability 9.0 (H100, H200), written in Triton's Gluon.

implementation                   the contract of `api`; imports the rest when a call can use it
forward                          TMA, wgmma, ping-pong warpgroups; continues (out, lse) of earlier hops
preprocess, backward_*           dQ, dK, dV summed in fp32 over hops by TMA reduce-add
tiles, backward_tiles            shapes by head_dim, with the reason beside each odd value
fp8                              the forward on operands rounded to e4m3, and their quantiser
compat, descriptors              Gluon's names over triton's releases; tiles of strided tensors for TMA
environment                      what must be installed
"""
