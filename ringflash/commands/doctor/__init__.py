"""The command `ringflash doctor`: is this machine, and every host of the job, fit for a long run?

facts (of one rank)  ->  gather (from all ranks)  ->  judge (findings, pure functions)  ->  command (the table)
probe (a kernel, a ring exchange: in separate processes, with a time limit)
"""
