"""Attention over packed documents on one device: python examples/single_device.py"""

import jax

import magi_jax as mj

# Three documents in one sequence of 1,000 tokens; each token sees itself and what came before it
# in its own document, at most 256 tokens back.
mask = mj.masks.varlen([300, 4, 696], causal=True, window=(255, 0))
print(
    f"{mask.area:,} of {mask.q_len * mask.k_len:,} pairs are visible, in {len(mask.slices)} slices"
)

keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], (1000, 8, 64))  # tokens, query heads, head dim
k = jax.random.normal(keys[1], (1000, 2, 64))  # 8 query heads share 2 key/value heads
v = jax.random.normal(keys[2], (1000, 2, 64))


@jax.jit
def loss(q, k, v):
    out = mj.flex_flash_attention(q, k, v, mask)
    return (out**2).mean()


value, grads = jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)
print(f"loss {value:.6f}; gradients {[g.shape for g in grads]}")
