#!/usr/bin/env bash
# Run the tests on this machine's GPUs in the active Python environment; see --help.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$repo"
# TransformerEngine multiplies fp32 in TF32 otherwise, a thousandth off, which hides real errors.
export NVIDIA_TF32_OVERRIDE=0
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"
exec python3 scripts/checks/run_gpu_tests.py "$@"
