"""One process of a job in which each process packs and plans sequences of its own: see
docs/howto/multi_host.md, "Every process plans alone".

    python own_sequences.py PROCESS PROCESSES COORDINATOR
"""

import functools
import os
import sys

import jax
import numpy as np

LENGTHS = [(30, 18, 48), (80, 10)]  # documents of each process
SEQ_LEN, CP, SHAPE = 96, 2, (4, 8)


def batch_of(process: int):
    """The one sequence of a process, ``[1, SEQ_LEN]``; tokens of all processes are different."""
    import magi_jax as mj

    start = 1 + process * SEQ_LEN
    documents = [np.arange(start, start + length) for length in LENGTHS[process]]
    (batch,) = mj.data.batch(mj.data.pack(iter(documents), SEQ_LEN), size=1)
    return batch


def planner():
    """Fitted to the same sample everywhere."""
    import magi_jax as mj

    causal = functools.partial(mj.masks.from_segment_ids, causal=True)
    return mj.data.PlanBatch(CP, (causal,)).fit(map(batch_of, range(len(LENGTHS))))


def embeddings() -> np.ndarray:
    """Rows of all tokens, ``[tokens, N, H]``."""
    size = (1 + len(LENGTHS) * SEQ_LEN, *SHAPE)
    return np.random.default_rng(0).normal(size=size).astype(np.float32)


def main() -> None:
    process, processes, coordinator = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)  # most of so short a job is compiling
    jax.config.update("jax_num_cpu_devices", CP)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    os.environ["PJRT_NPROC"] = str(2 * CP)
    jax.distributed.initialize(coordinator, processes, process)
    import magi_jax as mj

    mesh = jax.make_mesh((processes, CP), ("dp", "cp"))
    rows = jax.NamedSharding(mesh, jax.P("dp", "cp"))
    planned = planner()(batch_of(process))
    whole = jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, x), planned)

    @jax.jit
    def attend(table, batch):
        (plan,) = batch.plans
        x = table.at[batch.packed.tokens].get(out_sharding=jax.P("dp", "cp"))
        return mj.dist_attention(x, x, x, plan)

    with jax.set_mesh(mesh):
        out = attend(embeddings(), whole)
    (mine,) = {shard.index[0].start or 0 for shard in out.addressable_shards}
    assert mine == process
    found = np.concatenate([shard.data for shard in out.addressable_shards], axis=1)
    (plan,) = planned.plans
    np.save(f"{process}.npy", mj.undispatch(found, plan))


if __name__ == "__main__":
    main()
