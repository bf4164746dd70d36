#!/bin/sh
# One prepared run of under 5 minutes for a machine with CUDA: scripts/gpu_check.sh FOLDER [--limit-s 270] [--cases ...]
# Needs torch and this project's requirements in the Python that PYTHON names; scripts/gpu_check.py says what it checks.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" "$root/scripts/gpu_check.py" "$@"
