#!/bin/sh
# On a machine with an NVIDIA GPU: correctness first, then all timings, then a short table. Figures go to the
# given folder.
#
#   sh benchmarks/on_gpu.sh [FOLDER] [COMMIT]
set -eu
folder="${1:-benchmarks/results}"
commit="${2:-$(git rev-parse --short HEAD)}"
mkdir -p "$folder"
export XLA_PYTHON_CLIENT_PREALLOCATE=false
python3 -m pytest -q -p no:cacheprovider tests/gpu
python3 benchmarks/kernels.py --commit "$commit" --json "$folder/kernels_gpu.json"
python3 benchmarks/scaling.py time --commit "$commit" --out "$folder/scaling_kernels.json"
python3 benchmarks/scaling.py simulate --kernels "$folder/scaling_kernels.json" --out "$folder/scaling.json"
python3 benchmarks/memory.py --commit "$commit" --json "$folder/memory_gpu.json"
python3 benchmarks/report.py --kernels "$folder/kernels_gpu.json"
