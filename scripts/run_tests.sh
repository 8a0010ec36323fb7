#!/usr/bin/env bash
# Run every layer of the tests, cheapest first; one that fails does not hide those after it.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: bash scripts/run_tests.sh [options] [LAYER...]
       bash scripts/run_tests.sh --quick

Makes its environment if there is none and runs the layers of tests, cheapest first, also those
after one that fails. Without a LAYER all of them run, and the coverage of absorbed_mla, specs and
checkpoint_conversion by unit, conversion and distributed-2 must reach the bound. The last lines say
which tests were slowest and which failed, why tests were skipped, what each layer took, and how
many tests passed, failed and were skipped. The exit code is 1 if a layer failed.

Layers:
  lint           ruff check and ruff format --check, and scripts/checks/budgets.py
  unit           tests/unit, spread over the cores
  conversion     tests/conversion, likewise
  distributed-1  tests/distributed with 1 process each, spread over the cores
  distributed-2  tests/distributed with 2 processes that work together
  distributed-4  ... with 4 processes
  distributed-8  the grid of context parallelism with 8 processes
  distributed    the four of them
  training       tests/training
  old-megatron   tests/old_megatron with megatron-core 0.18.0, installed once beside the environment;
                 without a package index skipped, but an error where CI is set
  newest-megatron  what --quick runs, with the newest release of megatron-core where that is not the
                 one of the environment, likewise installed beside it
  dev-megatron   likewise with Megatron-LM's branch dev, of $ABSORBED_MLA_DEV_MEGATRON or cloned once;
                 skipped where neither is to be had
  clients        only if it is named: tests/clients, each in an environment of its own that is made
                 once; a client that cannot be installed is skipped
  readme         tests/readme: the commands of README.md in a fresh checkout

Options:
  --quick               lint and some tests of each promise (tests/quick.txt), with 1 and 2
                        processes, in place of layers; at most 4 minutes on 2 cores
  --fail-under PERCENT  coverage that a run of all layers must reach (default 95; 0: only print)
  -k EXPRESSION         run only the tests that match (pytest -k); coverage is only printed
  -h, --help            this text

Environment variables:
  ABSORBED_MLA_ENV      folder of the virtual environment (default: .venv in the repository)
  ABSORBED_MLA_DEV_MEGATRON  folder with a snapshot of Megatron-LM's branch dev
  ABSORBED_MLA_PYTHON   interpreter of an environment to use as it is
TEXT
}

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$ROOT/scripts/other_megatron.sh"
source "$ROOT/scripts/client_environments.sh"

ALL_LAYERS=(lint unit conversion distributed-1 distributed-2 distributed-4 distributed-8 training
  old-megatron newest-megatron dev-megatron readme)
# Layers that run if they are named.
NAMED_LAYERS=(clients)

parse_arguments() {
  LAYERS=() FAIL_UNDER=95 PYTEST_ARGS=()
  local quick=
  while (($#)); do
    case $1 in
      -h | --help) usage && exit ;;
      --fail-under)
        [[ ${2:-} =~ ^[0-9]+$ ]] && (($2 <= 100)) ||
          fail "--fail-under takes a whole percentage, got '${2:-}'"
        FAIL_UNDER=$2 && shift
        ;;
      -k)
        [[ -n ${2:-} ]] || fail "-k takes a pytest expression"
        PYTEST_ARGS+=(-k "$2") && shift
        ;;
      --quick) quick=yes ;;
      distributed) LAYERS+=(distributed-1 distributed-2 distributed-4 distributed-8) ;;
      -*) fail "unknown option $1; see --help" ;;
      *)
        [[ " ${ALL_LAYERS[*]} ${NAMED_LAYERS[*]} " == *" $1 "* ]] ||
          fail "unknown layer $1; there are ${ALL_LAYERS[*]} ${NAMED_LAYERS[*]} distributed"
        LAYERS+=("$1")
        ;;
    esac
    shift
  done
  EVERYTHING= COVERAGE=yes
  if [[ -n $quick ]]; then
    ((${#LAYERS[@]} == 0)) || fail "--quick takes no LAYER, got ${LAYERS[*]}"
    LAYERS=(lint quick-1 quick-2) COVERAGE=
  fi
  if ((${#LAYERS[@]} == 0)); then
    LAYERS=("${ALL_LAYERS[@]}")
    ((${#PYTEST_ARGS[@]})) || EVERYTHING=yes
  fi
}

# Layers whose coverage is measured; the other layers run the same lines in more processes.
MEASURED=(unit conversion distributed-2)

run_layer() {
  export ABSORBED_MLA_LINES= # see tests/support/line_probes.py
  if [[ -n $COVERAGE && " ${MEASURED[*]} " == *" $1 "* ]]; then ABSORBED_MLA_LINES=yes; fi
  case $1 in
    lint) run_lint ;;
    unit | conversion) run_in_parallel "$1" "tests/$1" ;;
    distributed-1) run_in_parallel "$1" tests/distributed ;;
    # These tests start processes themselves.
    clients) run_clients "$1" ;;
    training | readme) run_pytest "$1" "tests/$1" ;;
    old-megatron) if find_old_megatron; then run_pytest "$1" tests/old_megatron; fi ;;
    newest-megatron) if find_newest_megatron; then run_with_megatron "$1" "$MEGATRON_FOLDER"; fi ;;
    dev-megatron)
      if find_dev_megatron; then
        take_dataset_helpers "$MEGATRON_FOLDER"
        run_with_megatron "$1" "$MEGATRON_FOLDER"
      fi
      ;;
    # Only context parallelism is tested with 8 processes.
    distributed-8) run_distributed "$1" 8 tests/distributed/test_context_parallel_grid.py ;;
    distributed-*) run_distributed "$1" "${1#distributed-}" tests/distributed ;;
    quick-1) run_in_parallel "$1" "${QUICK_1[@]}" ;;
    quick-2) run_distributed "$1" 2 "${QUICK_2[@]}" ;;
  esac
}

# run_with_megatron LAYER FOLDER runs the quick tests with the megatron-core of that folder.
run_with_megatron() {
  local before=$PYTHONPATH
  export PYTHONPATH="$2:$PYTHONPATH"
  run_in_parallel "$1-1" "${QUICK_1[@]}"
  run_distributed "$1-2" 2 "${QUICK_2[@]}"
  export PYTHONPATH=$before
}

run_lint() {
  banner lint
  local status=0 start=$SECONDS
  "$PYTHON" scripts/checks/budgets.py || status=1
  if ! has_modules "$PYTHON" ruff; then
    skip ruff "it is not installed"
    ((status == 0)) || red "lint failed"
    return
  fi
  "$PYTHON" -m ruff check --output-format concise . || status=1
  "$PYTHON" -m ruff format --check --output-format concise . || status=1
  TIMES+=("lint $((SECONDS - start))s")
  ((status == 0)) || red "lint failed"
}

# Tests of one process each, spread over the cores where pytest-xdist is installed; those of a file
# together, so that what its fixtures make is made once.
run_in_parallel() {
  local layer=$1 tests=("${@:2}")
  if ! has_modules "$PYTHON" xdist; then
    run_pytest "$layer" "${tests[@]}"
    return
  fi
  banner "$layer"
  OMP_NUM_THREADS=1 record "$layer" "$PYTHON" -m pytest "${tests[@]}" -n auto --maxprocesses 8 \
    --dist loadfile "${PYTEST_FLAGS[@]}"
}

run_pytest() {
  local layer=$1 tests=("${@:2}")
  banner "$layer"
  record "$layer" "$PYTHON" -m pytest "${tests[@]}" "${PYTEST_FLAGS[@]}"
}

run_distributed() {
  local layer=$1 processes=$2 tests=("${@:3}")
  if [[ -n $GPUS ]] && ((processes > GPUS)); then
    skip "$layer" "$GPUS GPUs"
    return
  fi
  banner "$layer"
  # Like torchrun, but imports happen once, before the processes are forked; not possible with CUDA.
  local launch=(-m tests.support.forked "$processes")
  # --standalone takes a free port, so that two runs on one machine do not meet.
  [[ -z $GPUS ]] ||
    launch=(-m torch.distributed.run --standalone --nproc-per-node "$processes")
  OMP_NUM_THREADS=1 record "$layer" "$PYTHON" "${launch[@]}" \
    -m pytest "${tests[@]}" "${PYTEST_FLAGS[@]}"
}

# Runs a pytest command and adds its counts to the totals.
record() {
  local layer=$1 log=$WORK/$1.log status=0 start=$SECONDS failed=$FAILED
  ABSORBED_MLA_TEST_REPORT=$WORK/$layer.jsonl "${@:2}" 2>&1 | tee "$log" || status=$?
  TIMES+=("$layer $((SECONDS - start))s")
  count "$log"
  # 5: nothing was collected, which only a -k expression may do.
  if ((status == 5)) && ((${#PYTEST_ARGS[@]})); then status=0; fi
  ((status == 0)) && return
  # A layer can fail outside of any test, for instance in torchrun.
  ((FAILED > failed)) || FAILED=$((FAILED + 1))
  RED+=("$layer failed")
}

# Adds the numbers of pytest's last line, as in "3 failed, 120 passed, 2 skipped in 4.56s".
count() {
  local summary
  summary=$(grep -aE '[0-9]+ (passed|failed|error|skipped).* in [0-9.]+s' "$1" | tail -n 1) || true
  PASSED=$((PASSED + $(number passed "$summary")))
  FAILED=$((FAILED + $(number failed "$summary") + $(number 'errors?' "$summary")))
  SKIPPED=$((SKIPPED + $(number skipped "$summary")))
}

number() {
  local found
  found=$(grep -oE "[0-9]+ $1" <<<"$2" | head -n 1) || true
  echo "${found%% *}" | sed 's/^$/0/'
}

banner() {
  printf '\n=== %s\n' "$1"
}

skip() {
  printf '\n=== %s: skipped, %s\n' "$1" "$2"
  TIMES+=("$1 skipped")
}

# Something that is no test failed.
red() {
  FAILED=$((FAILED + 1))
  RED+=("$1")
}

finish() {
  printf '\n'
  if compgen -G "$WORK/*.jsonl" >/dev/null; then
    "$PYTHON" -m tests.support.report "$WORK"/*.jsonl
    printf '\n'
  fi
  times >"$WORK/times" # of this shell, then of its children: user and system, as 1m2.345s
  printf '%s\n' "${TIMES[@]}" "total ${SECONDS}s, of CPU $(awk -F '[ms ]+' \
    'NR == 2 { print int($1 * 60 + $2 + $3 * 60 + $4) }' "$WORK/times")s"
  ((${#RED[@]} == 0)) || printf '%s\n' "${RED[@]}"
  local skipped=
  ((SKIPPED == 0)) || skipped=", $SKIPPED skipped"
  printf '%s passed, %s failed%s\n' "$PASSED" "$FAILED" "$skipped"
}

# Coverage of every process of every layer together.
report_coverage() {
  [[ -n $COVERAGE ]] || return 0
  compgen -G "$WORK/.coverage*" >/dev/null || return 0
  banner coverage
  "$PYTHON" -m coverage combine --quiet
  local bound=0
  # A GPU machine does not run the branches for machines without one, a failed layer not all lines.
  if [[ -n $EVERYTHING && -z $GPUS ]] && ((${#RED[@]} == 0)); then bound=$FAIL_UNDER; fi
  "$PYTHON" -m coverage report --fail-under "$bound" || red "coverage below $bound %"
}

parse_arguments "$@"
cd "$ROOT"
# What one process has compiled, pytest's rewritten tests included, the others read: images of
# containers often forbid it, and there are some hundred processes.
unset PYTHONDONTWRITEBYTECODE
prepare_environment pytest hypothesis safetensors transformers rich xxhash
SECONDS=0 PASSED=0 FAILED=0 SKIPPED=0 TIMES=() RED=()
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

GPUS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or "")' 2>/dev/null)
PYTEST_FLAGS=(--quiet --tb=short "${PYTEST_ARGS[@]}")
mapfile -t QUICK_1 < <(sed -n 's/^1 //p' tests/quick.txt)
mapfile -t QUICK_2 < <(sed -n 's/^2 //p' tests/quick.txt)
if has_modules "$PYTHON" coverage; then
  export COVERAGE_FILE=$WORK/.coverage
elif [[ -n $COVERAGE ]]; then
  COVERAGE=
  echo "coverage is not installed: it will not be measured"
fi

for layer in "${LAYERS[@]}"; do run_layer "$layer"; done
report_coverage
finish
((${#RED[@]} == 0))
