"""ringflash plan: memory, time and the longest sequence of a training, before it is started.

    kept, passes  ->  read (the model)  ->  job (what is asked), machine  ->  memory, timing  ->  search  ->  command

The assumptions are `machine.Rates`; docs/plan.md says which of them are measured.
"""
