"""Known ways to shard attention over ranks, in plain JAX, each with this library's kernel as local attention.

They differ from `magi_jax.dist_attention` and from each other only in who holds which tokens and in what
moves when. `strategies.make` gives them by name.
"""
