"""Linear recurrences over a sharded sequence: gated delta rules, Mamba-2, and their short convolutions.

order             all-to-all between a layout's shards and contiguous ones, in which a recurrence runs
messages          sends and receives for these, under the watchdog
contiguous_shard  the contiguous tokens of a rank, cut where documents begin
convolution       short causal convolutions, with a halo of tokens from previous ranks
scan              gated delta rule and Mamba-2 scan, with the states of all previous ranks folded

Each rank runs a recurrence once, from an empty state, and computes along with it the linear map from an initial state
to the final one. It sends this map to all later ranks, and applies the maps of all previous ranks, so that no rank
waits for the recurrence of another. `huggingface/recurrent_layers.py` calls these functions in models of transformers.
Every call is differentiable, and collective in forward and backward.

    shard = ContiguousShard.of(x.shape[1], group)     # after x = to_sequence_order(x, group, layout)
    y = mamba2_scan(scan, x, dt, A, B, C, shard=shard)  # `scan`: transformers' or mamba_ssm's function
"""

from ringflash.recurrent.contiguous_shard import ContiguousShard
from ringflash.recurrent.convolution import causal_conv
from ringflash.recurrent.order import from_sequence_order, to_sequence_order
from ringflash.recurrent.scan import delta_rule, mamba2_scan

__all__ = ["ContiguousShard", "causal_conv", "delta_rule", "from_sequence_order", "mamba2_scan", "to_sequence_order"]
