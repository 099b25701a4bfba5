"""ringflash doctor: is this machine, and every host of the job, fit for a long run?

facts (what a rank sees)  ->  judge (findings, pure functions)  ->  command (the table)
probe (a kernel, a ring exchange: in processes of their own, with a time limit)
"""
