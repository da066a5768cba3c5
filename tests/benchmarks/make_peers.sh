#!/usr/bin/env bash
# An environment of their own for the libraries that we are compared with: their pins clash with ours.
# usage: tests/benchmarks/make_peers.sh FOLDER
set -euo pipefail
python3 -m venv "$1"
"$1/bin/pip" install --quiet torch==2.13.0
# Without its dependencies, as they would replace torch by a build of several gigabytes.
"$1/bin/pip" install --quiet --no-deps litdata==0.2.76
"$1/bin/pip" install --quiet webdataset==1.0.2 xxhash numpy boto3 requests lightning-utilities \
    tifffile obstore filelock
"$1/bin/pip" install --quiet datasets==5.2.0 lmdb==3.0.0 msgpack Pillow
# FFCV builds from source; Debian: g++ pkg-config libturbojpeg0-dev libopencv-dev.
"$1/bin/pip" install --quiet ffcv==1.0.2
"$1/bin/python" -c "import litdata, webdataset; print('litdata', litdata.__version__)"
