#!/bin/sh
# On a machine with several NVIDIA GPUs: group collectives and distributed attention over all of them. Correctness
# first, then collectives and attention in one process and in one process per GPU, then the rivals. The package
# with its CUDA kernels must be importable. About twenty minutes on eight GPUs, or three of everything in small
# with "short" as the third argument.
#
#   sh benchmarks/on_node.sh [FOLDER] [COMMIT] [short]
set -eu
folder="${1:-benchmarks/results}"
commit="${2:-$(git rev-parse --short HEAD)}"
length="${3:-whole}"
gpus="$(nvidia-smi -L | wc -l)"
port=29517
mkdir -p "$folder"
export XLA_PYTHON_CLIENT_PREALLOCATE=false
# A host's GPUs share the switch that multicast claims.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1

name() {
    echo "$folder/$1_${gpus}x_h200.json"
}

one_process() {
    echo "== one process, $gpus GPUs: $*"
    script="$1"
    shift
    python3 "benchmarks/$script" "$@" --commit "$commit"
}

process_per_gpu() {
    echo "== $gpus processes: $*"
    script="$1"
    shift
    port=$((port + 1))
    waited=""
    rank=0
    while [ "$rank" -lt "$gpus" ]; do
        python3 "benchmarks/$script" "$@" --commit "$commit" \
            --coordinator "localhost:$port" --processes "$gpus" --process "$rank" &
        waited="$waited $!"
        rank=$((rank + 1))
    done
    for process in $waited; do
        wait "$process"
    done
}

if [ "$length" = short ]; then
    tests="-k cast"
    pieces="--mebibytes 64 --piece-kibibytes 1024 --blocks 8"
    sizes="8192"
    heads="64:8"
    masks="--masks full varlen_causal"
    rivals="--rivals ulysses ring_zigzag"
else
    tests=""
    pieces=""
    sizes="8192 32768"
    heads="64:8 64:64"
    masks="--masks full causal window varlen_full varlen_causal varlen_block_causal"
    rivals=""
fi

# Options are words without spaces of their own, to be split.
# shellcheck disable=SC2086
{
    python3 -m pytest -q -p no:cacheprovider tests/gpu/test_native_collectives*.py $tests
    one_process collectives.py $pieces --json "$(name collectives)"
    process_per_gpu collectives.py $pieces --no-peers --json "$(name collectives_processes)"
    for tokens in $sizes; do
        shared="--tokens $tokens --heads $heads $masks"
        one_process distributed.py $shared --busy --json "$(name "distributed_$tokens")"
        process_per_gpu distributed.py $shared --transports native \
            --json "$(name "distributed_processes_$tokens")"
        one_process rivals.py $shared $rivals --json "$(name "rivals_$tokens")"
    done
}
