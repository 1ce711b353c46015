"""Small Flax NNX layers of a decoder whose attention is handed to them.

Every layer takes ``attend``, a function ``(query, key, value) -> out`` such as `attention_fn`
makes, as an argument of the call; layers with sinks hand it ``sinks=`` too. So one model runs under
a plan, under a mask on one device, or under a reference, and a plan that is an argument of the
jitted step needs no place in the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

Attend = Callable[..., jax.Array]


def rotate(x: jax.Array, positions: jax.Array, *, theta: float = 10_000.0) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864), pairing the two halves of the head dimension.

    Args:
        x: ``[*B, T, N, H]``, H even.
        positions: position of each token, ``[*B, T]`` integer: global positions, as
            ``plan.positions``, or positions within documents, which give the same scores inside
            every document. Tokens may be in any order; padding may have any position.
        theta: base of the frequencies.

    Returns:
        ``[*B, T, N, H]`` in the dtype of ``x``; angles are float32.

    Raises:
        ValueError: H is odd, or ``positions`` has another shape than ``x`` without heads.
    """
    half = x.shape[-1] // 2
    if x.shape[-1] % 2 or positions.shape != x.shape[:-2]:
        raise ValueError(
            "rotate needs x [*B, T, N, H] with even H and positions [*B, T];"
            f" got {x.shape=} {positions.shape=}"
        )
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    frequencies = frequencies.reshape((1,) * (positions.ndim + 1) + (half,))
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Attention(nnx.Module):
    """Self-attention with rotary embeddings, grouped key/value heads and learned sinks if wanted."""

    def __init__(
        self,
        features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        theta: float = 10_000.0,
        sinks: bool = False,
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections.

        Args:
            features: width of the residual stream.
            num_heads: query heads N.
            num_kv_heads: key/value heads K; N must be a multiple of it.
            head_dim: H.
            theta: base of the rotary frequencies.
            sinks: whether each query head has a learned logit that joins its softmax and has no
                value, so that a row may attend to nothing.
            dtype: dtype of the computation; parameters are float32.
            rngs: random streams.
        """
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads=} is not a multiple of {num_kv_heads=}")
        self.theta = theta
        self.sinks = nnx.Param(jnp.zeros(num_heads)) if sinks else None

        def project(heads: int) -> nnx.LinearGeneral:
            out = (heads, head_dim)
            return nnx.LinearGeneral(features, out, use_bias=False, dtype=dtype, rngs=rngs)

        self.query, self.key, self.value = map(project, (num_heads, num_kv_heads, num_kv_heads))
        self.out = nnx.LinearGeneral(
            (num_heads, head_dim), features, axis=(-2, -1), use_bias=False, dtype=dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """``x [*B, T, D]`` and ``positions [*B, T]`` to ``[*B, T, D]``."""
        query = rotate(self.query(x), positions, theta=self.theta)
        key = rotate(self.key(x), positions, theta=self.theta)
        options = {} if self.sinks is None else {"sinks": self.sinks[...]}
        return self.out(attend(query, key, self.value(x), **options))


class SwiGLU(nnx.Module):
    """Gated feed-forward layer (arXiv:2002.05202)."""

    def __init__(
        self, features: int, hidden: int, *, dtype: jnp.dtype | None = None, rngs: nnx.Rngs
    ):
        """Makes the projections; ``hidden`` is the width between them."""

        def linear(before: int, after: int) -> nnx.Linear:
            return nnx.Linear(before, after, use_bias=False, dtype=dtype, rngs=rngs)

        self.gate, self.up = linear(features, hidden), linear(features, hidden)
        self.down = linear(hidden, features)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., D]``."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a `Decoder`.

    Attributes:
        vocab_size: number of tokens.
        num_layers: number of blocks.
        features: width of the residual stream.
        num_heads, num_kv_heads, head_dim: N, K and H of the attention.
        hidden: width inside the feed-forward layers.
        theta: base of the rotary frequencies.
        sinks: whether query heads have learned sinks.
        activations: how activations ``[*B, T, D]`` are sharded over automatic mesh axes, such as
            ``P(("dp", "fsdp"), "cp", None)``. Where weights are sharded over an axis of the batch, as
            with fsdp, say it: XLA may otherwise gather the batch instead of the weights.
        dtype: dtype of the computation, None for that of the parameters, which are float32.

    Raises:
        ValueError: a size below 1, or an odd head_dim.
    """

    vocab_size: int
    num_layers: int
    features: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    theta: float = 10_000.0
    sinks: bool = False
    activations: PartitionSpec | None = None
    dtype: jnp.dtype | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "features", "num_heads", "num_kv_heads", "head_dim", "hidden")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.head_dim % 2:
            raise ValueError(f"rotary embeddings pair up an even head_dim, got {self.head_dim}")

    def keep(self, x: jax.Array) -> jax.Array:
        """``x`` in the sharding of ``activations``."""
        if self.activations is None:
            return x
        return jax.lax.with_sharding_constraint(x, self.activations)


class DecoderBlock(nnx.Module):
    """Pre-norm transformer block: RMSNorm, attention, RMSNorm, SwiGLU."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        """Makes the layers of one block."""
        self.config = config
        features, dtype = config.features, config.dtype
        self.attention_norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.attention = Attention(
            features,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            theta=config.theta,
            sinks=config.sinks,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.mlp = SwiGLU(features, config.hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """``x [*B, T, D]`` and ``positions [*B, T]`` to ``[*B, T, D]``."""
        keep = self.config.keep
        x = keep(x + self.attention(keep(self.attention_norm(x)), positions, attend))
        return keep(x + self.mlp(keep(self.mlp_norm(x))))


def _as_rows_of(tokens: jax.Array) -> PartitionSpec | None:
    """How rows that are looked up by tokens lie on explicit mesh axes; JAX asks for it. None without them."""
    spec = jax.typeof(tokens).sharding.spec
    return PartitionSpec(*spec, None) if any(spec) else None


def _in_turn(attends: Attend | Sequence[Attend]) -> Sequence[Attend]:
    """The attention functions that blocks take in turn."""
    in_turn = attends if isinstance(attends, (list, tuple)) else (attends,)
    for attend in in_turn:
        if not callable(attend):
            raise TypeError(
                "attends must be a function (query, key, value) -> out, such as attention_fn(plan) makes,"
                f" or a sequence of them; got {type(attend).__name__}"
            )
    if not in_turn:
        raise ValueError("attends is empty: it must have an attention function for the first block")
    return in_turn


class Decoder(nnx.Module):
    """A language model of `DecoderBlock`s; each block is given its own attention."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        """Makes the embedding, the blocks, the last norm and the output projection."""
        self.config = config
        vocab_size, features, dtype = config.vocab_size, config.features, config.dtype
        # In float32, so that the gradients of a token's many places are summed in it; rows are cast.
        self.embed = nnx.Embed(vocab_size, features, rngs=rngs)
        self.blocks = nnx.List(DecoderBlock(config, rngs=rngs) for _ in range(config.num_layers))
        self.norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(features, vocab_size, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attends: Attend | Sequence[Attend]
    ) -> jax.Array:
        """Logits of every token.

        Args:
            tokens: ``[*B, T]`` integer.
            positions: ``[*B, T]`` integer.
            attends: attention of all blocks, or of the blocks in turn; shorter sequences are repeated,
                so that one of two alternates.

        Returns:
            ``[*B, T, vocab_size]`` float32.

        Raises:
            TypeError: ``attends`` is neither a function nor a sequence of them.
            ValueError: ``attends`` is empty.
        """
        in_turn = _in_turn(attends)
        table = self.embed.embedding[...]
        x = table.at[tokens].get(mode="fill", out_sharding=_as_rows_of(tokens))
        x = self.config.keep(x if self.config.dtype is None else x.astype(self.config.dtype))
        for index, block in enumerate(self.blocks):
            x = block(x, positions, in_turn[index % len(in_turn)])
        return self.head(self.norm(x)).astype(jnp.float32)
