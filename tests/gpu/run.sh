#!/usr/bin/env bash
# All that needs a GPU: tests/gpu/run.sh SHARDS..., folders of TARs with `image` and `label`.
# Needs Linux, a torch with CUDA and its torchvision, and `pip install -e ".[test]"`; for CUDA 12,
# nvidia-dali-cuda120 in place of nvidia-dali-cuda130. With libraries of CUDA in nvidia/*/lib of a folder
# that `pip install --target` made, LD_LIBRARY_PATH must name these folders.
set -euo pipefail
cd "$(dirname "$0")/../.."
python -m pytest -n 0 -m gpu tests/stream/test_gpu_decoding.py
python -m tests.gpu.measure "$@"
