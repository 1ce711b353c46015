#!/bin/sh
# On a machine with NVIDIA GPUs: correctness first, then all timings, then a short table. Figures go to the given
# folder. The package with its CUDA kernels must be importable.
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

python3 -m pytest -q -p no:cacheprovider tests/gpu
run kernels.py --json "$folder/kernels_gpu.json"
python3 benchmarks/scaling prepare
run scaling time --out "$folder/scaling_kernels.json"
run scaling simulate --kernels "$folder/scaling_kernels.json" --out "$folder/scaling.json"
if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
    run scaling check --json "$folder/scaling_check.json"
fi
run recompilation.py --seq-len 32768 --heads 64 8 --head-dim 128 --dtype bfloat16 \
    --json "$folder/recompilation_gpu.json"
run memory.py --json "$folder/memory_gpu.json"
python3 benchmarks/report.py --kernels "$folder/kernels_gpu.json"
