"""Writes docs/features.md: which test shows which feature, with which kernels, in which pass.

    python tools/feature_table.py

The numbers come from the cases of tests/features, so that no cell can say what no test does.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "features"))

from feature_pairs import DISTRIBUTED, ONE_DEVICE, distributed_cases, one_device_cases  # noqa: E402

PAGE = ROOT / "docs" / "features.md"

HOW = (
    ("sinks", "`sinks=` `[N]` or `[X, N]`"),
    ("soft cap, scale", "`logits_soft_cap=`, `scale=`"),
    ("log-sum-exp, differentiable", "`return_residual=True`"),
    ("largest logit of each head", "`return_max_logits=True`; a statistic without a derivative"),
    ("equal bits", "`deterministic=True`; `dist_attention`: `DistOptions(deterministic=True)`"),
    (
        "precision of partial results",
        "float32 between stages; on the wire `DistOptions(reduce_dtype=)`",
    ),
    (
        "another mask in every step, one compilation",
        "plans of one spec as arguments (`make_plan(spec=)`, `mj.data.PlanBatch.fit`); on one device tables"
        " of one spec (`slice_table(mask, spec=)`)",
    ),
    ("several masks in one step", "`plan.with_mask(mask)`: one dispatch, a plan for each mask"),
    ("masks of groups of heads", "a sequence of masks, or of plans on one dispatch"),
    (
        "cross-attention",
        "a rectangular mask; `plan.with_mask(mask, keys=plan_of_the_keys)`, or"
        ' `keys="replicated"` for keys that every rank holds',
    ),
    ("blocks chosen on the device", "`block_sparse_table(blocks, block_size, q_len)` inside jit"),
    (
        "batches",
        "`[B, T, N, H]` under one mask; a mask of `B * T` tokens (`masks.concatenate`) makes it one"
        " packed stream; `stack_plans` gives each sequence a plan",
    ),
    ("multi-token labels, RoPE", "`roll(x, plan, shift)`, `plan.positions`"),
    (
        "remat",
        'out and lse are named "context", kept remote keys (`DistOptions(keep_remote_kv=True)`)'
        ' "remote_kv"',
    ),
    ("dropout, bias, masks as functions", "refused with what to do instead"),
)

# Tests of one feature, beside the combinations.
OWN = {
    "head dims 64, 96, 128, 192 with 128, 256": ("tests/gpu/test_cuda_kernels.py::test_head_dims",),
    "any head dim, GQA, MQA, on the CPU": (
        "tests/ops/test_attention_conformance.py::test_head_layouts",
    ),
    "sinks": ("tests/ops/test_attention_conformance.py::test_sinks",),
    "soft cap": ("tests/ops/test_attention_conformance.py::test_soft_cap",),
    "scale": ("tests/gpu/test_cuda_kernels.py::test_scales",),
    "largest logit of each head": (
        "tests/parallel/test_travelling.py::test_the_largest_logit_counts_visitors",
    ),
    "equal bits on one device": (
        "tests/ops/test_attention_conformance.py::test_repeats_give_equal_bits",
        "tests/gpu/test_cuda_kernels.py::test_results_are_the_same_bits_in_every_run",
    ),
    "equal bits over ranks": (
        "tests/features/test_options.py::test_repeats_give_equal_bits_over_ranks",
        "tests/features/test_options.py::test_kernels_without_a_fixed_order_are_refused",
    ),
    "precision of partial results": (
        "tests/parallel/test_contexts.py::test_kept_keys_and_narrow_reductions",
    ),
    "several masks in one step": (
        "tests/parallel/test_many_masks.py::test_layers_take_full_and_sliding_masks_in_turn",
        "tests/parallel/test_remat_layers.py::test_scan_over_rematerialised_layers_with_two_plans",
    ),
    "masks of groups of heads": (
        "tests/ops/test_heads_and_batches.py::test_masks_for_groups_of_heads",
        "tests/parallel/test_many_masks.py::test_masks_for_groups_of_heads",
        "tests/parallel/test_many_masks.py::test_masks_for_groups_of_heads_inside_a_shard_map",
    ),
    "cross-attention": (
        "tests/parallel/test_cross_attention.py::test_results_and_gradients",
        "tests/parallel/test_cross_attention.py::test_inside_a_shard_map",
        "tests/parallel/test_cross_attention.py::test_encoder_and_decoder_train_as_one",
    ),
    "blocks chosen on the device": (
        "tests/ops/test_block_sparse.py::test_random_blocks",
        "tests/ops/test_block_sparse.py::test_chosen_indices",
        "tests/ops/test_block_sparse.py::test_a_new_choice_compiles_nothing",
    ),
    "batches": (
        "tests/ops/test_heads_and_batches.py::test_rows_of_a_batch_with_masks_of_their_own",
        "tests/parallel/test_many_masks.py::test_a_batch_as_one_packed_stream",
        "tests/parallel/test_contexts.py::test_batch_with_one_plan_on_three_axes",
        "tests/parallel/test_contexts.py::test_batch_with_a_plan_for_each_sequence",
    ),
    "roll and positions, uneven lengths, their adjoints": (
        "tests/parallel/test_tokens.py::test_in_a_data_loader",
        "tests/parallel/test_tokens.py::test_whole_device_arrays",
        "tests/parallel/test_tokens.py::test_local_rows_inside_a_shard_map",
        "tests/parallel/test_tokens.py::test_gradients_are_the_moves_back",
    ),
    "travelling queries": (
        "tests/parallel/test_travelling.py::test_every_kind_of_mask_in_one_program",
    ),
    "rows that cross between nodes once": (
        "tests/parallel/test_nodes.py::test_every_mask",
        "tests/parallel/test_nodes.py::test_bytes_between_nodes_are_those_of_the_report",
        "tests/plan/test_node_plans.py::test_every_cell_once_and_every_row_once_per_node",
    ),
    "remat": (
        "tests/ops/test_attention_transforms.py::test_remat_saves_the_context",
        "tests/features/test_options.py::test_a_policy_keeps_remote_keys",
    ),
    "refusals": (
        "tests/ops/test_heads_and_batches.py::test_functions_of_positions_are_refused_with_what_to_do",
        "tests/ops/test_dot_product_attention.py::test_refusals",
        "tests/flax/test_attention_fn.py::test_what_it_cannot_do_is_refused",
    ),
}

# The kernels that a case runs with, on the CPU and on a GPU.
COLUMNS = (("cpu", "cpu"), ("reference", "reference"), ("sm80", "cpu"), ("sm90", "reference"))
HEADER = """\
# Features

This page is written by `tools/feature_table.py` from the cases of `tests/features`; a test compares it with
them.

## How to ask for them
"""
EXAMPLES = """
## Examples

```python
import jax
import jax.numpy as jnp
import numpy as np

import magi_jax as mj

rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((256, heads, 16)), jnp.float32) for heads in (4, 2, 2))

# QK-clip: the largest logit of each head says by how much its projections are to shrink.
out, max_logits = mj.flex_flash_attention(q, k, v, mj.masks.causal(256), return_max_logits=True)
shrink = jnp.minimum(1.0, 100.0 / max_logits)

# One group of heads sees everything before it, the other a window.
both = [mj.masks.causal(256), mj.masks.local(256, window=(31, 0))]
out = mj.flex_flash_attention(q, k, v, both)


# Each block of 64 queries chooses two blocks of keys, in the same program and anew with every batch.
@jax.jit
def sparse(q, k, v):
    pooled_q, pooled_k = (x.reshape(4, 64, -1, 16).mean((1, 2)) for x in (q, k))
    _, chosen = jax.lax.top_k(pooled_q @ pooled_k.T, 2)
    return mj.flex_flash_attention(q, k, v, mj.block_sparse_table(chosen, 64, 256, causal=True))


assert sparse(q, k, v).shape == q.shape
```

Cross-attention over four ranks: decoder and encoder each have a plan, and a third has the queries of one and
the keys of the other.

```python
auto = jax.sharding.AxisType.Auto
mesh = jax.make_mesh((4,), ("cp",), (auto,), devices=jax.devices()[:4])
decoder = mj.make_plan(mj.masks.causal(96), cp_size=4)
encoder = mj.make_plan(mj.masks.full(256), cp_size=4)
cross = decoder.with_mask(mj.masks.full(96, 256), keys=encoder)
queries = mj.dispatch(np.asarray(q[:96]), decoder)
keys, values = mj.dispatch((np.asarray(k), np.asarray(v)), encoder)
out = mj.dist_attention(queries, keys, values, cross, mesh=mesh)

# The same with the keys whole on every rank, as those of a short prompt may be.
whole = decoder.with_mask(mj.masks.full(96, 256), keys="replicated")
again = mj.dist_attention(queries, k, v, whole, mesh=mesh)
np.testing.assert_allclose(out, again, rtol=1e-5, atol=1e-5)
```
"""
COMBINED = """
## In combination

Cases are chosen so that every pair of levels of two features meets in one of them. Each compares the results
(F, forward) and the gradients of q, k, v and sinks (B, backward) with dense attention in float64. A number is
that of a case of

- `tests/features/test_feature_pairs.py` in the columns cpu and reference,
- `tests/gpu/test_features_on_gpu.py` in the columns sm80 and sm90, run on a machine with the GPU; sm90 stands
  for its kernels with those of sm80 behind them, which serve what it does not support
  ([kernels](kernel_notes.md)), and float32 is bfloat16 there.

The cases of the GPU columns passed with jax 0.11.2, those of one device on an H200, the distributed ones over
two H200s of one host, with two ranks also where a case says four. With one GPU they have one rank.
"""


def number_of(cases: list[dict[str, str]], *levels: tuple[str, str]) -> int:
    """The first case with all these levels."""
    return next(i for i, case in enumerate(cases) if all(case[a] == x for a, x in levels))


def combinations(title: str, factors, cases, test: str) -> list[str]:
    """A table of all levels of all features by kernels and passes."""
    lines = [f"\n### {title}: `{test}[number]`\n"]
    lines.append("| feature | level |" + "".join(f" {c} F | {c} B |" for c, _ in COLUMNS))
    lines.append("|---|---|" + "---|---|" * len(COLUMNS))
    for feature, levels in factors.items():
        for level in () if feature == "implementation" else levels:
            cells = []
            for _, kernels in COLUMNS:
                number = number_of(cases, (feature, level), ("implementation", kernels))
                backward = "none" if (feature, level) == ("max logits", "returned") else number
                cells.append(f" {number} | {backward} |")
            lines.append(f"| {feature} | {level} |" + "".join(cells))
    return lines


def page() -> str:
    """The text of docs/features.md."""
    lines = [HEADER, "| feature | how |", "|---|---|"]
    lines += [f"| {feature} | {how} |" for feature, how in HOW]
    lines += [EXAMPLES, COMBINED]
    lines += combinations("One device", ONE_DEVICE, one_device_cases(), "test_one_device")
    lines += combinations("Distributed", DISTRIBUTED, distributed_cases(), "test_distributed")
    lines += ["\n## Tests of single features\n", "| feature | tests |", "|---|---|"]
    for feature, tests in OWN.items():
        lines.append(f"| {feature} | {'<br>'.join(f'`{test}`' for test in tests)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
