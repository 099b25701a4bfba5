"""Two ranks that agree on the checkpoint to continue from, then do not; and that read other text than one another.

Each prints what it is told. Arguments: a folder of text for each rank.
"""

import sys
from collections.abc import Callable

import torch.distributed as dist

from recipes.lightning.resume import SameCheckpoint
from recipes.lightning.text import TextData


def tell(call: Callable[[], object]) -> None:
    """The error of a call."""
    try:
        call()
    except ValueError as error:
        print(f"rank {dist.get_rank()}: {error}", flush=True)


dist.init_process_group("gloo")
folders, rank = sys.argv[1:], dist.get_rank()
SameCheckpoint("a.ckpt").setup(None, None, "fit")
tell(lambda: SameCheckpoint(None if rank else "a.ckpt").setup(None, None, "fit"))
TextData(16, folders[0], ".txt").read()
tell(lambda: TextData(16, folders[rank], ".txt").read())
tell(lambda: TextData(16, folders[0], ".no" if rank else ".txt").read())
