#!/usr/bin/env bash
# All that a GPU is needed for, in under 8 minutes: do the kernels of LSTM(fused=True) give the numbers of the loop,
# and how fast are they against PyTorch with cuDNN?
#
#     benchmarks/single_device/kernels.sh [a Python with torch for CUDA]
#
# A kernel whose blocks wait for each other forever ends with its time limit.
set -euo pipefail
cd "$(dirname "$0")/../.."
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
JAX_PLATFORMS=cuda,cpu timeout -k 5 150 python -m pytest -q -n 0 -m gpu -k kernel tests/test_gpu.py
for work in D C A B; do
  timeout -k 5 110 python -m benchmarks.single_device.gpu "$work" --numbers bfloat16 tf32 --rounds 5 --steps 4 \
    ${1:+--torch-python "$1"} || echo "NOT MEASURED: $work"
done
