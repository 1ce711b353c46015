#!/bin/sh
# On a machine with several NVIDIA GPUs: group collectives and distributed attention over all of them, in one
# process and in one process per GPU. The package with its CUDA kernels must be importable.
#
#   sh benchmarks/on_node.sh [FOLDER] [COMMIT] [whole|short] [PART ...]
#
# Parts are tests, collectives, attention, processes (attention in one process per GPU) and rivals; all by
# default, correctness first. "short" is everything in small. What fails, or takes longer than its time, is
# named at the end and keeps nothing else from running.
set -u
folder="${1:-benchmarks/results}"
commit="${2:-$(git rev-parse --short HEAD)}"
length="${3:-whole}"
[ $# -gt 3 ] && shift 3 || set -- tests collectives attention processes rivals
gpus="$(nvidia-smi -L | wc -l)"
port=$((20000 + $$ % 20000)) # another one for another script at the same time
failed=""
mkdir -p "$folder"
export XLA_PYTHON_CLIENT_PREALLOCATE=false
# A host's GPUs share the switch that multicast claims.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1

name() {
    echo "$folder/$1_${gpus}x_h200.json"
}

limited() {
    timeout -k 5 "$limit_s" python3 "$@" || {
        echo "failed with $?: $*"
        return 1
    }
}

one_process() {
    echo "== one process, $gpus GPUs: $*"
    script="$1"
    shift
    limited "benchmarks/$script" "$@" --commit "$commit" || failed="$failed $script"
}

process_per_gpu() {
    echo "== $gpus processes: $*"
    script="$1"
    shift
    port=$((port + 1))
    waited=""
    rank=0
    while [ "$rank" -lt "$gpus" ]; do
        limited "benchmarks/$script" "$@" --commit "$commit" \
            --coordinator "localhost:$port" --processes "$gpus" --process "$rank" &
        waited="$waited $!"
        rank=$((rank + 1))
    done
    for process in $waited; do
        wait "$process" || failed="$failed $script:processes"
    done
}

if [ "$length" = short ]; then
    limit_s=60
    tests="thousand and direct or killed and staged"
    pieces="--mebibytes 64 --piece-kibibytes 1024 --blocks 8"
    sizes="8192"
    heads="64:8"
    masks="--masks causal"
    rivals="--rivals ulysses"
else
    limit_s=600
    tests=""
    pieces=""
    sizes="8192 32768"
    heads="64:8 64:64"
    masks="--masks full causal window varlen_full varlen_causal varlen_block_causal"
    rivals=""
fi

# Options are words without spaces of their own, to be split.
# shellcheck disable=SC2086
for part in "$@"; do
    case "$part" in
    tests)
        echo "== tests"
        limited -m pytest -q -p no:cacheprovider tests/gpu/test_native_collectives*.py -k "$tests" ||
            failed="$failed tests"
        ;;
    collectives)
        one_process collectives.py $pieces --json "$(name collectives)"
        process_per_gpu collectives.py $pieces --no-peers --json "$(name collectives_processes)"
        ;;
    attention | processes | rivals)
        for tokens in $sizes; do
            shared="--tokens $tokens --heads $heads $masks"
            case "$part" in
            attention)
                one_process distributed.py $shared --busy --json "$(name "distributed_$tokens")"
                ;;
            processes)
                process_per_gpu distributed.py $shared --transports native \
                    --json "$(name "distributed_processes_$tokens")"
                ;;
            rivals)
                one_process rivals.py $shared $rivals --json "$(name "rivals_$tokens")"
                ;;
            esac
        done
        ;;
    *)
        echo "no such part: $part"
        failed="$failed $part"
        ;;
    esac
done
if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
echo "all parts ran"
