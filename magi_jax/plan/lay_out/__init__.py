"""Lays the solvers' results out as tables of the sizes that a `PlanSpec` gives, or of those needed.

`dispatch` has where tokens live. `work` has what crosses ranks and what each computes: it takes one of the
`ways`, `stages` or late queries (`late`), with `travel` beside them, and `fit` brings them into given sizes.
All move rows by the tables of `transfer`.
"""
