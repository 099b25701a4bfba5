"""The command `ringflash plan`: memory, time and the longest sequence of a training, before it is started.

    saved_bytes, traffic  ->  read (the model)  ->  job, machine  ->  memory, timing  ->  search  ->  command

The assumptions are in `machine.Rates`; docs/plan.md says which of them are measured.
"""
