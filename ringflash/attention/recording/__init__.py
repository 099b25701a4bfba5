"""The driver's work of an all-gather's call, recorded once and repeated by later calls of the same form.

tape                    when a call is recorded, repeated, or run as usual
recorder                observes a call, and lists its steps
slots                   finds the tensors of a later call by their places in the recorded one
repeated_launch         a kernel's launch with other addresses
step_lists, steps       the steps, and lists of them that are issued at once
"""
