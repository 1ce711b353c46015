"""Trains the small language model in a job of several processes, with checkpoints.

Two processes of four virtual CPU devices each, on one machine, in two terminals (or with & in one):

    python examples/multi_host.py --processes 2 --process 0 --devices 4 --cp 8
    python examples/multi_host.py --processes 2 --process 1 --devices 4 --cp 8

One process per GPU of one machine, and a cluster under SLURM (see examples/slurm/train.sbatch):

    python examples/multi_host.py --device gpu --processes 2 --process 0 --cp 2 $SIZES    # and --process 1
    srun python examples/multi_host.py --device gpu --cluster --cp 16 $SIZES

where SIZES="--features 512 --head-dim 64 --dtype bfloat16": GPU kernels take head dims from 64 on. Between
the GPUs of one machine, ``--transport native`` moves keys and values by kernels of magi_jax instead of XLA's
all_to_all.

Every process packs the same documents, plans alone, compares the fingerprints of its plans with the others,
and feeds the shards of its own devices. A checkpoint says nothing about the mesh: resume with another
``--cp``, ``--dp`` or number of processes, and the losses go on as they would have.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
from pathlib import Path

import corpus
import jax
import language_model
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import magi_jax as mj
from magi_jax import comm


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1, help="number of processes of the job")
    parser.add_argument("--process", type=int, default=0, help="number of this process")
    parser.add_argument("--coordinator", default="localhost:12731", help="address of process 0")
    parser.add_argument(
        "--cluster", action="store_true", help="ask the cluster (SLURM, MPI, ...) for these three"
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "gpu"), help="cpu is that of virtual devices"
    )
    parser.add_argument("--devices", type=int, help="CPU devices of this process; default: all")
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps")
    parser.add_argument("--batch", type=int, default=2, help="packed sequences of a step")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a packed sequence")
    parser.add_argument("--window", type=int, default=256, help="keys that every other layer sees")
    parser.add_argument("--dp", type=int, default=1, help="replicas, which share the batch")
    parser.add_argument("--cp", type=int, default=8, help="devices that share a sequence")
    parser.add_argument(
        "--transport", default="portable", help="portable (all_to_all) or native (GPUs of one host)"
    )
    language_model.add_model_flags(parser)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=Path, help="folder on a disk that all processes see")
    parser.add_argument(
        "--save-every", type=int, default=10, help="steps between checkpoints (and the last)"
    )
    return parser.parse_args()


def start(flags: argparse.Namespace) -> jax.sharding.Mesh:
    """Joins the job and makes the mesh (dp, cp) of all its devices."""
    if flags.device == "cpu":
        devices = flags.devices or flags.dp * flags.cp // flags.processes
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        os.environ.setdefault("PJRT_NPROC", str(2 * devices))
    if flags.cluster:
        jax.distributed.initialize()
    elif flags.processes > 1:
        # One process per GPU: process i of the machine takes GPU i.
        local = [flags.process] if flags.device == "gpu" else None
        jax.distributed.initialize(
            flags.coordinator, flags.processes, flags.process, local_device_ids=local
        )
    types = (AxisType.Auto,) * 2
    return jax.make_mesh((flags.dp, flags.cp), ("dp", "cp"), axis_types=types)


def say(text: str) -> None:
    """Prints on one process only."""
    if jax.process_index() == 0:
        print(text, flush=True)


def symmetric_memory(flags: argparse.Namespace, mesh: jax.sharding.Mesh, specs):
    """Memory of the native transport, with room for all plans; or nothing."""
    if flags.transport == "portable":
        return contextlib.nullcontext()
    sizes = {
        "num_heads": flags.features // flags.head_dim,
        "num_kv_heads": flags.kv_heads,
        "head_dim": flags.head_dim,
        "dtype": flags.dtype,
    }
    room = max(comm.attention_staging_bytes(spec, **sizes) for spec in specs)
    return comm.symmetric_memory(mesh, "cp", placement="staged", staging_bytes=room)


def restore(manager: ocp.CheckpointManager | None, state):
    """The newest checkpoint in the shardings of ``state``, and its step; or ``state`` and 0."""
    step = None if manager is None else manager.latest_step()
    if step is None:
        return state, 0
    say(f"resuming after step {step}")
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    return manager.restore(step, args=ocp.args.StandardRestore(wanted)), step


def main() -> None:
    flags = parse_flags()
    mesh = start(flags)
    say(f"{jax.process_count()} processes, {jax.device_count()} devices: {dict(mesh.shape)}")

    files = corpus.source_files()
    window = functools.partial(language_model.sliding_window, size=flags.window)
    planner = mj.data.PlanBatch(flags.cp, (language_model.full_causal, window), grow=True)

    def batches():
        sequences = mj.data.pack(
            corpus.documents(files, flags.seed), flags.seq_len, seed=flags.seed
        )
        return mj.data.batch(sequences, flags.batch)

    planner = planner.fit(batches(), num_batches=4, margin=1.5)
    graphdef, params = nnx.split(language_model.make_model(flags), nnx.Param)
    optimizer = optax.adamw(flags.learning_rate)
    everywhere, by_token = NamedSharding(mesh, P()), NamedSharding(mesh, P("dp", "cp"))
    manager = None
    if flags.checkpoints is not None:
        options = ocp.CheckpointManagerOptions(save_interval_steps=flags.save_every)
        manager = ocp.CheckpointManager(flags.checkpoints.absolute(), options=options)

    with jax.set_mesh(mesh), symmetric_memory(flags, mesh, planner.specs) as memory:
        options = language_model.OPTIONS
        if memory is not None:
            say(memory.describe())
            options = dataclasses.replace(options, transport=memory.transport)
        train_step = language_model.make_train_step(graphdef, optimizer, options=options)
        state = mj.data.place((params, optimizer.init(params)), everywhere)
        (params, opt_state), done = restore(manager, state)
        # The stream of batches is a function of the seed, so that its place is the step.
        remaining = itertools.islice(batches(), done, flags.steps)
        with mj.data.Prefetch(remaining, planner) as planned:
            for step, batch in enumerate(planned, start=done + 1):
                mj.data.check_same_plans(batch.plans)
                batch = mj.data.place(batch, by_token)
                params, opt_state, loss, _ = train_step(params, opt_state, batch)
                say(f"step {step}  loss {float(loss):.6f}")
                if memory is not None:
                    memory.check()  # a peer that did not come is named here
                if manager is not None:
                    arguments = ocp.args.StandardSave((params, opt_state))
                    manager.save(step, args=arguments, force=step == flags.steps)
    if manager is not None:
        manager.wait_until_finished()
        manager.close()


if __name__ == "__main__":
    main()
