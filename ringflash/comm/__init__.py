"""Communication between the ranks of a group.

group          the group of ranks that share a sequence, and the host of a rank
mesh           the data x context device mesh
timeouts       limits of the time that a rank waits for another one
communicator   additional gloo or NCCL communicators over the ranks of a group
agreement      comparison of a call by all ranks before anything is sent
call_numbers   detection of ranks that make their calls in different orders
call_order     comparison of the order in which ranks make other calls that need all ranks
seeding        temporary seeding of random number generators, by rank
modules/       agreement about modules: buffers, averages of gradients, FSDP2 units
transport/     transfers of K, V and gradients: messages, or copies between GPUs
watchdog/      report and end of stalled calls
driver         the CUDA driver, and lists of commands that a function in C issues (driver_commands, command_issuer)
event_pool     events that calls use again
cuda_graphs    memory that stays at its address for captured calls
wait_timer     timer of the waits between kernels
profiling      named ranges for profilers
"""
