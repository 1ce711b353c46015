"""Solvers: where tokens go, what crosses ranks, and what each rank computes in which stage.

Four rooms, each of which knows those before it alone: `dispatch` gives tokens to ranks, `work` finds what
a layout asks for, `cost` predicts how long that takes, and `overlap` chooses by it. Beside them
`slice_table` builds the table that kernels read, `intervals` has the joins that all share, and `engine` the
compiled module.
"""
