#!/bin/sh
# On a machine with NVIDIA GPUs: correctness first, then all timings, then a short table. Figures go to the given
# folder. The package with its CUDA kernels must be importable. About half an hour.
#
#   sh benchmarks/on_gpu.sh [FOLDER] [COMMIT]
set -eu
folder="${1:-benchmarks/results}"
commit="${2:-$(git rev-parse --short HEAD)}"
mkdir -p "$folder"
export XLA_PYTHON_CLIENT_PREALLOCATE=false

run() {
    script="$1"
    shift
    python3 "benchmarks/$script" "$@" --commit "$commit"
}

kernels() {
    name="$1"
    shift
    run kernels.py --passes forward backward --budget-ms 50 "$@" --json "$folder/$name.json"
}

python3 -m pytest -q -p no:cacheprovider tests/gpu
kernels kernels_gpu --head-dims 128 --peers cudnn
kernels kernels_64_gpu --head-dims 64 --peers cudnn
kernels kernels_peers_gpu --head-dims 128 --lengths 8192 32768 \
    --masks full causal varlen_full varlen_causal window --peers cudnn tokamax torch_sdpa torch_varlen
kernels kernels_flex_gpu --head-dims 128 --lengths 8192 \
    --masks causal varlen_causal window --peers cudnn torch_flex
python3 benchmarks/scaling prepare
run scaling time --out "$folder/scaling_kernels.json"
run scaling simulate --kernels "$folder/scaling_kernels.json" --out "$folder/scaling.json"
if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
    run scaling check --json "$folder/scaling_check.json"
fi
run recompilation.py --seq-len 32768 --heads 64 8 --head-dim 128 --dtype bfloat16 \
    --json "$folder/recompilation_gpu.json"
run memory.py --jobs 4 --longest-run 131072 --json "$folder/memory_gpu.json"
for name in kernels_gpu kernels_64_gpu kernels_peers_gpu kernels_flex_gpu; do
    python3 benchmarks/report.py --kernels "$folder/$name.json"
done
