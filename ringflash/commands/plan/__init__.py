"""The command `ringflash plan`: memory, time and the longest sequence of a training, before it is started.

    trace  ->  model_shape  ->  job (and machine)  ->  ring, memory, timing  ->  search  ->  command

The assumptions are in `job.Rates`; docs/plan.md says which of them are measured.
"""
