#!/usr/bin/env bash
# From a Hugging Face checkpoint to a trained absorbed-MLA model, back, and to text, on a CPU.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: bash scripts/quickstart.sh [options]

Makes its environment if there is none. Then, on the CPU, in less than 5 minutes on 2 cores:
  1. transformers makes a tiny DeepSeek-V3 and saves it;
  2. converts it to absorbed MLA and compares the logits with those of transformers;
  3. trains Megatron's own standard MLA from it in one process, on texts that count in words;
  4. trains the absorbed model from it on the same batches, with tensor and sequence parallelism
     over two processes;
  5. prints both losses and draws them;
  6. converts the trained model back; transformers loads it and continues to count;
  7. generates the same text with our model in Megatron's engine, from a cache of latents, and
     prints both texts beside the right one.
The commands that it prints can be run again in an activated shell; the last lines say how to
activate one.

Options:
  --output DIR      folder for checkpoints, metrics and loss.png (default: quickstart_output in
                    the repository)
  --train-iters N   iterations of each training, at least 10 (default 200;
                    with few the model does not learn to count)
  -h, --help        this text

Environment variables:
  ABSORBED_MLA_ENV      folder of the virtual environment (default: .venv in the repository)
  ABSORBED_MLA_PYTHON   interpreter of an environment to use as it is
TEXT
}

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

OUTPUT=$ROOT/quickstart_output TRAIN_ITERS=200
while (($#)); do
  case $1 in
    -h | --help) usage && exit ;;
    --output)
      [[ -n ${2:-} ]] || fail "--output takes a folder"
      OUTPUT=$2 && shift
      ;;
    --train-iters)
      [[ ${2:-} =~ ^[0-9]+$ ]] && ((10#$2 >= 10)) ||
        fail "--train-iters takes a number of at least 10, got '${2:-}'"
      TRAIN_ITERS=$((10#$2)) && shift
      ;;
    *) fail "unknown option $1; see --help" ;;
  esac
  shift
done
mkdir -p "$OUTPUT" 2>/dev/null || fail "cannot create --output $OUTPUT"

SECONDS=0
prepare_environment matplotlib safetensors transformers rich xxhash
# The same everywhere: two tensor-parallel processes would need two GPUs.
export CUDA_VISIBLE_DEVICES=
"$PYTHON" "$ROOT/scripts/quickstart.py" --output "$OUTPUT" --train-iters "$TRAIN_ITERS"
echo "done in ${SECONDS}s. To run these commands, and those of README.md, in this shell:"
activation
