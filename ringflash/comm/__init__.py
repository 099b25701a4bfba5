"""Communication between the ranks of a group.

group          the group of ranks that share a sequence, and the host of a rank
timeouts       limits of the time that a rank waits for another one
communicator   additional gloo or NCCL communicators over the ranks of a group
agreement      comparison of a call by all ranks before anything is sent
call_numbers   detection of ranks that make their calls in different orders
transport/     transfers of K, V and gradients: messages, or copies between GPUs
watchdog/      report and end of stalled calls
cuda_graphs    memory that stays at its address for captured calls
wait_timer     timer of the waits between kernels
"""
