#!/bin/sh
# On a machine with several NVIDIA GPUs: group collectives and distributed attention over all of them, in one
# process and in one process per GPU. The package with its CUDA kernels must be importable.
#
#   sh benchmarks/on_node.sh [FOLDER] [COMMIT] [whole|short] [PART ...]
#
# Parts, in the order of what is worth most: tests, attention (8 kv heads), mha (64), collectives, processes
# (attention in one process per GPU) and rivals; all of these by default. "missing" has to be named: masks of 64
# kv heads whose goals were not reached on two GPUs, as they are and with other options. "short" ends within 8
# minutes: what is left then is named and not begun. Files of results are written after every mask, so that a run that is cut leaves
# what it has. What fails, or takes longer than its time, is named at the end and keeps nothing else from
# running. docs/collectives.md says what each part does.
set -u
folder="${1:-benchmarks/results}"
commit="${2:-$(git rev-parse --short HEAD)}"
length="${3:-whole}"
[ $# -gt 3 ] && shift 3 || set -- tests attention mha collectives processes rivals
gpus="$(nvidia-smi -L | wc -l)"
port=$((20000 + $$ % 20000)) # another one for another script at the same time
began="$(date +%s)"
failed=""
mkdir -p "$folder"
export XLA_PYTHON_CLIENT_PREALLOCATE=false
# A host's GPUs share the switch that multicast claims.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1

name() {
    echo "$folder/$1_${gpus}x_h200.json"
}

# limited SECONDS ARGUMENT ...: Python with these arguments, for so long or as long as is left.
limited() {
    limit_s="$1"
    shift
    left_s=$((began + total_s - $(date +%s)))
    [ "$left_s" -lt "$limit_s" ] && limit_s="$left_s"
    if [ "$limit_s" -lt 10 ]; then
        echo "no time left for: $*"
        return 1
    fi
    timeout -k 5 "$limit_s" python3 "$@" || {
        echo "failed with $?: $*"
        return 1
    }
}

one_process() {
    echo "== one process, $gpus GPUs, $(($(date +%s) - began)) s: $*"
    seconds="$1"
    script="$2"
    shift 2
    limited "$seconds" "benchmarks/$script" "$@" --commit "$commit" || failed="$failed $script"
}

process_per_gpu() {
    echo "== $gpus processes, $(($(date +%s) - began)) s: $*"
    seconds="$1"
    script="$2"
    shift 2
    port=$((port + 1))
    waited=""
    rank=0
    while [ "$rank" -lt "$gpus" ]; do
        limited "$seconds" "benchmarks/$script" "$@" --commit "$commit" \
            --coordinator "localhost:$port" --processes "$gpus" --process "$rank" &
        waited="$waited $!"
        rank=$((rank + 1))
    done
    wrong=""
    for process in $waited; do
        wait "$process" || wrong="$script:processes"
    done
    failed="$failed${wrong:+ $wrong}"
}

# The whole of long masks would take a single GPU seconds.
shared="--single-tokens 65536"
if [ "$length" = short ]; then
    total_s=480
    tests="thousand and (direct or pushed or processes and staged) or killed and staged"
    tests="$tests or lse_merge or narrow_wire"
    sizes="32768"
    masks="causal varlen_causal full varlen_full window varlen_block_causal tiny_varlen_causal"
    process_masks="causal varlen_causal"
    pieces="--mebibytes 128 --piece-kibibytes 64 1024 --placements direct"
    process_pieces="--mebibytes 128 --piece-kibibytes 1024 --blocks 16"
    rivals="--masks causal varlen_causal --rivals ulysses"
    long_s=130 middle_s=60 tests_s=100
else
    total_s=100000
    tests=""
    sizes="8192 32768"
    masks="full causal window varlen_full varlen_causal varlen_block_causal tiny_varlen_full"
    masks="$masks tiny_varlen_causal"
    process_masks="$masks"
    pieces=""
    process_pieces=""
    rivals="--masks $masks"
    long_s=600 middle_s=600 tests_s=600
fi
# Several tests at a time, where pytest can; more would wait for each other's turns on the GPUs.
workers=""
python3 -c "import xdist" >/dev/null 2>&1 && workers="-n 3"

# Options are words without spaces of their own, to be split.
# shellcheck disable=SC2086
for part in "$@"; do
    case "$part" in
    tests)
        echo "== tests"
        limited "$tests_s" -m pytest -q -p no:cacheprovider $workers tests/gpu/test_native_collectives*.py \
            -k "$tests" || failed="$failed tests"
        ;;
    collectives)
        one_process "$middle_s" collectives.py $pieces --json "$(name collectives)"
        process_per_gpu "$middle_s" collectives.py $process_pieces --no-peers \
            --json "$(name collectives_processes)"
        ;;
    attention | mha | processes | rivals)
        for tokens in $sizes; do
            case "$part" in
            attention)
                one_process "$long_s" distributed.py --tokens "$tokens" --heads 64:8 --masks $masks \
                    $shared --busy --transports native --json "$(name "distributed_$tokens")"
                ;;
            mha)
                one_process "$long_s" distributed.py --tokens "$tokens" --heads 64:64 --masks $masks \
                    $shared --busy --transports native --json "$(name "distributed_mha_$tokens")"
                ;;
            processes)
                process_per_gpu "$middle_s" distributed.py --tokens "$tokens" --heads 64:8 \
                    --masks $process_masks $shared --transports native \
                    --json "$(name "distributed_processes_$tokens")"
                ;;
            rivals)
                one_process "$middle_s" rivals.py --tokens "$tokens" --heads 64:8 $rivals \
                    --json "$(name "rivals_$tokens")"
                ;;
            esac
        done
        ;;
    missing)
        one="distributed.py --tokens 32768 --heads 64:64 --busy --transports native"
        one_process "$long_s" $one --masks causal window --json "$(name distributed_missing)"
        one_process "$middle_s" $one --masks causal --reduce-dtype bfloat16 --json "$(name distributed_missing_bfloat16)"
        one_process "$middle_s" $one --masks causal --overlap 4 --json "$(name distributed_missing_overlap)"
        ;;
    *)
        echo "no such part: $part"
        failed="$failed $part"
        ;;
    esac
done
echo "$(($(date +%s) - began)) s in all"
if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
echo "all parts ran"
