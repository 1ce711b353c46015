#!/bin/sh
# On a machine with an NVIDIA GPU: correctness first, then all forward timings. Figures go to the given folder.
#
#   sh benchmarks/on_gpu.sh [FOLDER]
set -eu
folder="${1:-benchmarks/results}"
mkdir -p "$folder"
python3 -m pytest -q tests/gpu
python3 benchmarks/kernels.py --json "$folder/kernels.json"
