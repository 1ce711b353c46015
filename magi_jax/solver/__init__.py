"""Solvers: where tokens go, what crosses ranks, and what each rank computes in which stage."""
