"""Our kernels for compute capability 9.0 (H100, H200), written in Triton's Gluon.

implementation         the contract of `api`; imports the rest when a call can use it
forward                TMA, wgmma, ping-pong warpgroups; continues (out, lse) of earlier hops
backward               dQ, dK and dV, summed in fp32 over hops by TMA reduce-add
fp8                    attention on operands rounded to e4m3, and their quantiser
gather_scatter         K/V copied to where other ranks pull them; sums of gradients over ranks
compat, descriptors    Gluon's names across triton releases; tiles of strided tensors for TMA
launcher, environment  launches without triton's overhead; check of triton and its C compiler
"""
