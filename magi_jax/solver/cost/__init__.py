"""Cost: how long work takes on a machine.

`model` has the rates of kernels and links and `machine` how ranks are wired; `timeline` prices the stages of
a direction with them, and `schedule` lays these out in time.
"""
