"""Two ranks that first agree on the checkpoint to continue from, then do not; each prints what it is told."""

import torch.distributed as dist

from ringflash.lightning.checkpoints import SameCheckpoint

dist.init_process_group("gloo")
SameCheckpoint("a.ckpt").setup(None, None, "fit")
try:
    SameCheckpoint(None if dist.get_rank() else "a.ckpt").setup(None, None, "fit")
except ValueError as error:
    print(f"rank {dist.get_rank()}: {error}", flush=True)
