"""Work: what a layout asks for.

`find_work` is the whole of it: `remote` has the keys that each rank lacks, `stages` what each computes once
they come in stages, `transfer` and `two_level` the tables of rows that move, in one step or in two.
"""
