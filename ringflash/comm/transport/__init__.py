"""Transports that move K, V and gradients between the ranks of a group.

registry         choice of a group's transport, opened on first use
point_to_point   batches of sends and receives, over gloo or NCCL
areas            interface of the transports that move what ranks have written to named memory areas
copy_engine      areas that all GPUs of a host map, and copies between them
store_exchanges  torch's count of its exchanges over the store, made equal on all ranks before memory is mapped
message_gather   areas whose contents travel as messages of NCCL or gloo
gpu_areas        CUDA streams and cached views, shared by both kinds of areas
copies           many copies between GPUs with one driver call
buffers          the pool of communication buffers
"""

from ringflash.comm.transport.areas import GroupAreas
from ringflash.comm.transport.buffers import buffer
from ringflash.comm.transport.copy_engine import CopyEngine
from ringflash.comm.transport.message_gather import NcclGather
from ringflash.comm.transport.point_to_point import Message, Pending, PointToPoint
from ringflash.comm.transport.registry import (
    TRANSPORTS,
    UNDECIDED,
    Transport,
    Undecided,
    buffer_bytes,
    choose_transport,
    group_transport,
    message_transport,
    open_exchange_areas,
    open_gather_areas,
    open_transport,
    release_buffers,
    transport_name,
)
