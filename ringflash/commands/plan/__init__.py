"""ringflash plan: memory, time and the longest sequence of a training, before it is started.

    shape (of the model) and job (what is asked) on a machine  ->  memory, timing  ->  search  ->  command

The assumptions are `machine.Rates`; docs/plan.md says which of them are measured.
"""
