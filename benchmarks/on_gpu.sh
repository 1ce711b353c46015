#!/bin/sh
# On a machine with NVIDIA GPUs: correctness first, then all timings, then short tables. The package with its CUDA
# kernels must be importable.
#
#   sh benchmarks/on_gpu.sh [FOLDER] [COMMIT] [whole|short] [PART ...]
#
# Parts are tests, kernels, kernels_64, flash, peers, scaling, recompilation and memory; all by default. They run one
# after the other, in about half an hour. "short" is everything in small and side by side, in about a minute,
# to see that all of it runs: its figures mean nothing. What fails, or takes longer than its time, is named at
# the end and keeps nothing else from running.
set -u
folder="${1:-benchmarks/results}"
commit="${2:-$(git rev-parse --short HEAD)}"
length="${3:-whole}"
[ $# -gt 3 ] && shift 3 || set -- tests kernels kernels_64 flash peers scaling recompilation memory
mkdir -p "$folder/logs"
export XLA_PYTHON_CLIENT_PREALLOCATE=false

if [ "$length" = short ]; then
    limit_s=150
    tests="tests/gpu/test_cuda_kernels.py -k test_scales"
    lengths="--lengths 2048 --masks causal varlen_causal --lead-ms 30 --budget-ms 30"
    peers="$lengths"
    simulated="--cp 8 --masks varlen_causal swa_causal"
    seconds=10
    checked="--tokens-per-rank 8192 --masks varlen_causal --budget-s 20"
    packings="--packings 200 --constants 2 --seq-len 8192"
    memory="--first 8192 --last 16384 --longest-run 8192 --layers 2"
else
    limit_s=900
    tests="tests/gpu"
    lengths=""
    peers="--lengths 8192 32768 --masks full causal window varlen_full varlen_causal"
    simulated=""
    seconds=240
    checked=""
    packings="--constants 8 --seq-len 32768"
    memory="--longest-run 131072"
fi

limited() {
    echo "== $*"
    timeout -k 5 "$limit_s" python3 "$@"
}

kernels() {
    name="$1"
    shift
    limited benchmarks/kernels.py "$@" --commit "$commit" --json "$folder/$name.json" &&
        python3 benchmarks/report.py --kernels "$folder/$name.json"
}

# FlexAttention compiles for a quarter of a minute for each mask, in one thread, and PyTorch keeps what it made:
# a process for each mask leaves the programs of all to be found by the run that times them.
# shellcheck disable=SC2086
compile_flex() {
    export TORCHINDUCTOR_COMPILE_THREADS=1
    python3 -c "import torch" 2> /dev/null || return 0
    for mask in full causal window varlen_full varlen_causal varlen_block_causal; do
        limited benchmarks/kernels.py --head-dims 128 $peers --masks "$mask" --peers torch_flex \
            --lead-ms 1 --budget-ms 1 > /dev/null 2>&1 &
    done
    wait
}

scaling() {
    works="$folder/scaling_works.xz"
    pieces="$folder/scaling_pieces.npz"
    times="$folder/scaling_kernels.json"
    limited benchmarks/scaling prepare $simulated --works "$works" --pieces "$pieces" \
        --jobs "$(nproc)" &&
        limited benchmarks/scaling time $simulated --pieces "$pieces" --budget-s "$seconds" \
            --commit "$commit" --out "$times" &&
        limited benchmarks/scaling simulate $simulated --works "$works" --kernels "$times" \
            --commit "$commit" --out "$folder/scaling.json" --pictures "$folder/pictures" &&
        rm "$works" "$pieces" || return 1
    [ "$(python3 -c 'import jax; print(len(jax.devices()))')" -lt 2 ] ||
        limited benchmarks/scaling check $checked --commit "$commit" \
            --json "$folder/scaling_check.json"
}

# Options are words without spaces of their own, to be split.
# shellcheck disable=SC2086,SC2046
part() {
    case "$1" in
    tests) limited -m pytest -q -p no:cacheprovider $tests ;;
    kernels) kernels kernels_gpu --head-dims 128 --peers cudnn fa3_jax $lengths ;;
    kernels_64) kernels kernels_64_gpu --head-dims 64 --peers cudnn $lengths ;;
    flash) kernels kernels_flash_gpu --head-dims 128 --peers fa3_jax fa3 fa4_jax $peers ;;
    peers)
        compile_flex
        kernels kernels_peers_gpu --head-dims 128 $peers \
            --peers cudnn tokamax torch_sdpa torch_varlen torch_flex
        ;;
    scaling) scaling ;;
    recompilation)
        limited benchmarks/recompilation.py $packings --heads 64 8 --head-dim 128 \
            --dtype bfloat16 --commit "$commit" --json "$folder/recompilation_gpu.json"
        ;;
    memory)
        limited benchmarks/memory.py --jobs 4 $memory --commit "$commit" \
            --json "$folder/memory_gpu.json"
        ;;
    *)
        echo "no such part: $1"
        return 1
        ;;
    esac
}

finished() {
    part "$1"
    echo "$?" > "$folder/logs/$1.rc"
}

for name in "$@"; do
    rm -f "$folder/logs/$name.rc"
    if [ "$length" = short ]; then
        finished "$name" > "$folder/logs/$name.txt" 2>&1 &
    else
        finished "$name"
    fi
done
wait
failed=""
for name in "$@"; do
    [ "$length" != short ] || cat "$folder/logs/$name.txt"
    [ "$(cat "$folder/logs/$name.rc")" = 0 ] || failed="$failed $name"
done
rm -r "$folder/logs"
if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
echo "all parts ran"
