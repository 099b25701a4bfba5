"""The data x context device mesh.

Six ranks with context_parallel_size 2; each row shares one sequence:

                        context_parallel
    data_parallel  0       r0  r1
                   1       r2  r3
                   2       r4  r5
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# torch 2.15 makes it public, and warns of the old name.
_set_timeout_of = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout

DATA_AXIS, CONTEXT_AXIS = "data_parallel", "context_parallel"

Size = int | Literal["auto"]


def mesh_sizes(data_parallel_size: Size, context_parallel_size: Size, world_size: int) -> tuple[int, int]:
    """Return both sizes as numbers, data-parallel first.

    Args:
        data_parallel_size, context_parallel_size: "auto" is world_size divided by the other; both "auto" is one
            sequence over all ranks.
    Raises:
        ValueError: the product of the sizes is not world_size.
    """
    dp, cp = data_parallel_size, context_parallel_size
    for name, size in (("data_parallel_size", dp), ("context_parallel_size", cp)):
        if size != "auto" and (not isinstance(size, int) or size < 1):
            raise ValueError(f"{name} must be 'auto' or a positive integer, got {size!r}; 'auto' takes what is left.")
    if dp == "auto":
        dp = 1 if cp == "auto" else world_size // cp
    if cp == "auto":
        cp = world_size // dp
    if dp * cp != world_size:
        raise ValueError(
            f"data_parallel_size * context_parallel_size must be the number of ranks ({world_size}), "
            f"got {data_parallel_size} * {context_parallel_size}; start {max(dp, 1) * max(cp, 1)} ranks, "
            "or set one of the sizes to 'auto'."
        )
    return dp, cp


def data_context_mesh(device_type: str, dp_size: int, cp_size: int) -> DeviceMesh:
    """Return the mesh of all ranks; the process group must exist."""
    return init_device_mesh(device_type, (dp_size, cp_size), mesh_dim_names=(DATA_AXIS, CONTEXT_AXIS))


def set_group_timeouts(mesh: DeviceMesh, timeout: timedelta | None) -> None:
    """Set how long collectives in a mesh's groups wait for a missing rank; None keeps torch's default."""
    if timeout is None:
        return
    for group in mesh.get_all_groups():
        _set_timeout_of(timeout, group)


class DataContextRanks:
    """Mixin: this rank's coordinates on a data x context `device_mesh`; `layout` says which tokens it holds."""

    device_mesh: DeviceMesh
    layout: str

    @property
    def cp_mesh(self) -> DeviceMesh:
        """Mesh of the ranks that share this rank's sequence."""
        return self.device_mesh[CONTEXT_AXIS]

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """Process group of `cp_mesh`."""
        return self.cp_mesh.get_group()

    @property
    def cp_size(self) -> int:
        """Number of ranks that share one sequence."""
        return self.cp_mesh.size()

    @property
    def dp_size(self) -> int:
        """Number of sequences processed in parallel."""
        return self.device_mesh[DATA_AXIS].size()

    @property
    def dp_rank(self) -> int:
        """Index of this rank's sequence among them."""
        return self.device_mesh[DATA_AXIS].get_local_rank()
