#!/bin/sh
# On a machine with NVIDIA GPUs: correctness first, then all timings, then short tables. Figures go to the given
# folder. The package with its CUDA kernels must be importable. About half an hour, or three minutes of
# everything in small with "short" as the third argument.
#
#   sh benchmarks/on_gpu.sh [FOLDER] [COMMIT] [short]
set -eu
folder="${1:-benchmarks/results}"
commit="${2:-$(git rev-parse --short HEAD)}"
length="${3:-whole}"
mkdir -p "$folder"
export XLA_PYTHON_CLIENT_PREALLOCATE=false

run() {
    script="$1"
    shift
    echo "== $script $*"
    python3 "benchmarks/$script" "$@" --commit "$commit"
}

kernels() {
    name="$1"
    shift
    run kernels.py "$@" --json "$folder/$name.json"
}

if [ "$length" = short ]; then
    tests="tests/gpu/test_cuda_kernels.py -k test_scales"
    lengths="--lengths 2048 --masks causal varlen_causal --lead-ms 30 --budget-ms 30"
    peers="$lengths"
    simulated="--cp 8 --masks varlen_causal swa_causal"
    seconds=10
    checked="--tokens-per-rank 8192 --masks varlen_causal --budget-s 20"
    packings="--packings 200 --constants 2 --seq-len 8192"
    memory="--first 8192 --last 16384 --longest-run 8192"
else
    tests="tests/gpu"
    lengths=""
    peers="--lengths 8192 32768 --masks full causal window varlen_full varlen_causal"
    simulated=""
    seconds=240
    checked=""
    packings="--constants 8 --seq-len 32768"
    memory="--longest-run 131072"
fi

# Options are words without spaces of their own, to be split.
# shellcheck disable=SC2086
{
    python3 -m pytest -q -p no:cacheprovider $tests
    kernels kernels_gpu --head-dims 128 --peers cudnn $lengths
    kernels kernels_64_gpu --head-dims 64 --peers cudnn $lengths
    kernels kernels_peers_gpu --head-dims 128 $peers \
        --peers cudnn tokamax torch_sdpa torch_varlen torch_flex
    pieces="$folder/scaling_pieces.npz"
    python3 benchmarks/scaling prepare $simulated --pieces "$pieces"
    run scaling time $simulated --pieces "$pieces" --budget-s "$seconds" \
        --out "$folder/scaling_kernels.json"
    rm "$pieces"
    run scaling simulate $simulated --kernels "$folder/scaling_kernels.json" \
        --out "$folder/scaling.json" --pictures "$folder/pictures"
    if [ "$(python3 -c 'import jax; print(len(jax.devices()))')" -gt 1 ]; then
        run scaling check $checked --json "$folder/scaling_check.json"
    fi
    run recompilation.py $packings --heads 64 8 --head-dim 128 --dtype bfloat16 \
        --json "$folder/recompilation_gpu.json"
    run memory.py --jobs 4 $memory --json "$folder/memory_gpu.json"
}
for name in kernels_gpu kernels_64_gpu kernels_peers_gpu; do
    python3 benchmarks/report.py --kernels "$folder/$name.json"
done
