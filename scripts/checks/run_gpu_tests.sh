#!/usr/bin/env bash
# Run the oracle tests on this machine's GPUs, with NCCL and with TransformerEngine's layers where
# TransformerEngine is installed, in the active Python environment. Leaves per-combination errors
# and a summary of hardware and versions.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/checks/run_gpu_tests.sh [OUTPUT_DIR]

Runs tests/distributed at TP = 1, 2, 4, as far as there are GPUs, and tests/unit on one GPU.
Needs an environment with CUDA torch, megatron-core, einops, pytest and hypothesis.
OUTPUT_DIR (default: gpu_test_results) gets errors-tpN.jsonl, pytest-*.log and environment.json.
EOF
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
out=$(mkdir -p "${1:-gpu_test_results}" && cd "${1:-gpu_test_results}" && pwd)
cd "$repo"
# TransformerEngine multiplies fp32 in TF32 otherwise, a thousandth off, which hides real errors.
export NVIDIA_TF32_OVERRIDE=0
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"

gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" = 0 ]; then
    echo "run_gpu_tests.sh: no CUDA GPU is visible to torch; scripts/run_tests.sh runs on a CPU" >&2
    exit 2
fi

python3 - "$out/environment.json" <<'PY'
import importlib.metadata as metadata, json, sys, torch
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
facts = {
    "gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count(),
    "torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    "megatron-core": version("megatron-core"), "transformer-engine": version("transformer-engine"),
}
json.dump(facts, open(sys.argv[1], "w"), indent=1)
print(json.dumps(facts))
PY

failed=0
for n in 1 2 4; do
    [ "$n" -le "$gpus" ] || continue
    echo "== tests/distributed, TP=$n"
    ABSORBED_MLA_ERROR_TABLE="$out/errors-tp$n.jsonl" torchrun --standalone --nproc-per-node "$n" \
        -m pytest -q tests/distributed 2>&1 | tee "$out/pytest-tp$n.log" | tail -25 || failed=1
done
echo "== tests/unit"
python3 -m pytest -q tests/unit 2>&1 | tee "$out/pytest-unit.log" | tail -25 || failed=1
exit "$failed"
