#!/usr/bin/env bash
# Environments of their own for the libraries that we are compared with: their pins clash with ours,
# and with each other's.
# usage: tests/benchmarks/make_peers.sh FOLDER
set -euo pipefail

# FOLDER/$1, with what tests/benchmarks/loops.py needs besides the libraries that it measures.
# torch comes first: others would replace it by a build of several gigabytes.
environment() {
    python3 -m venv "$folder/$1"
    pip="$folder/$1/bin/pip install --quiet"
    $pip torch==2.13.0
    $pip opencv-python-headless "${@:2}"
}
folder=$1

environment main numpy xxhash
$pip --no-deps litdata==0.2.76
$pip boto3 requests lightning-utilities tifffile obstore filelock
$pip webdataset==1.0.2 datasets==5.2.0 lmdb==3.0.0 msgpack Pillow tokenizers
# FFCV builds from source; Debian: g++ pkg-config libturbojpeg0-dev libopencv-dev.
$pip ffcv==1.0.2 || echo "ffcv cannot be built here: it will be left out"

# What `import streaming` takes, without torchvision and the clients of object stores but for S3's.
environment streaming "numpy<2.2" "xxhash<4" "transformers<5" boto3 \
    Brotli catalogue matplotlib Pillow python-snappy tqdm zstd
$pip --no-deps mosaicml-streaming==0.13.0
