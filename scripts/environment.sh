# The environment that scripts/run_tests.sh and scripts/quickstart.sh run in. Sourced, not executed.
#
# prepare_environment MODULE... sets PYTHON to an interpreter with torch, megatron-core and MODULEs:
#   1. $ABSORBED_MLA_PYTHON, where that is set;
#   2. python3 itself, on a machine whose GPU it can use with torch and megatron-core in place;
#   3. a virtual environment in $ABSORBED_MLA_ENV (default: .venv in the repository), made the first
#      time (1 to 2 minutes, needs the package index) and reused without a network afterwards. This
#      project is installed in it, so that an activated shell has its modules and commands.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ENVIRONMENT=${ABSORBED_MLA_ENV:-$ROOT/.venv}
[[ $ENVIRONMENT == /* ]] || ENVIRONMENT=$PWD/$ENVIRONMENT
STAMP=.absorbed-mla-requirements # the requirements that a finished environment was made from
PROJECT_STAMP=.absorbed-mla-project # which project is installed in it
UNFINISHED=.absorbed-mla-unfinished

# torch's version is exact because triton's must fit it, ruff's because formatting changes with it.
REQUIREMENTS=(
  torch==2.13.0 numpy packaging psutil einops matplotlib tqdm ruff==0.17.5
  'pytest>=8' 'hypothesis>=6' 'coverage>=7.6' pytest-timeout pytest-xdist pytest-cov
  'setuptools>=77'
  'safetensors>=0.5' 'transformers>=5' xxhash rich
  starlette uvicorn httptools uvloop 'pydantic>=2' prometheus-client openai 'llguidance>=1.9,<2'
  'mkdocs-material>=9.6'
)
# megatron-core 0.19 imports triton unconditionally; a CPU build of torch does not bring it.
TRITON=triton==3.7.1
# Its metadata require Python 3.12, but megatron.core itself runs on 3.11.
MEGATRON=megatron-core==0.19.2
# Modules that an environment which this script did not make must have.
IMPORTS=(torch megatron.core triton numpy psutil einops)

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Whether interpreter $1 finds every module named after it. Imports nothing but their parents.
has_modules() {
  "$1" - "${@:2}" >/dev/null 2>&1 <<'PY'
import importlib.util, sys
sys.exit(not all(importlib.util.find_spec(name) for name in sys.argv[1:]))
PY
}

prepare_environment() {
  IMPORTS+=("$@")
  if [[ -n ${ABSORBED_MLA_PYTHON:-} ]]; then
    use_given_python
  elif python3_has_gpu; then
    PYTHON=$(command -v python3)
  else
    use_virtual_environment
  fi
  export PYTHON
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
  # Megatron warns on import about each optional package that is absent.
  export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
  # Megatron compiles some small functions, which needs a C++ compiler and a path without spaces.
  export TORCHDYNAMO_DISABLE=1
  # Gloo and torchrun look the machine up by its name, which need not resolve without a network.
  if ! getent hosts "$(uname -n)" >/dev/null 2>&1; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
  fi
}

use_given_python() {
  PYTHON=$ABSORBED_MLA_PYTHON
  "$PYTHON" -c '' 2>/dev/null || fail "ABSORBED_MLA_PYTHON=$PYTHON does not run"
  has_modules "$PYTHON" "${IMPORTS[@]}" ||
    fail "ABSORBED_MLA_PYTHON=$PYTHON lacks one of: ${IMPORTS[*]}"
}

python3_has_gpu() {
  command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1 || return 1
  command -v python3 >/dev/null && has_modules python3 "${IMPORTS[@]}" || return 1
  python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

use_virtual_environment() {
  [[ $(uname -s) == Linux ]] ||
    fail "megatron-core needs triton, which exists for Linux only; this is $(uname -s)"
  PYTHON=$ENVIRONMENT/bin/python
  environment_is_ready && project_is_installed && return
  mkdir -p "$(dirname "$ENVIRONMENT")" 2>/dev/null || fail "cannot create $(dirname "$ENVIRONMENT")"
  # A second command started meanwhile waits for the first one's environment.
  exec {lock}>"$ENVIRONMENT.lock" || fail "cannot write $ENVIRONMENT.lock"
  if command -v flock >/dev/null; then flock "$lock"; fi
  environment_is_ready || make_environment
  project_is_installed || install_project
  exec {lock}>&-
}

wanted_stamp() {
  printf '%s\n' "${REQUIREMENTS[@]}" "$TRITON" "$MEGATRON"
}

environment_is_ready() {
  [[ -f $ENVIRONMENT/$STAMP && ! -e $ENVIRONMENT/$UNFINISHED ]] || return 1
  [[ $(<"$ENVIRONMENT/$STAMP") == "$(wanted_stamp)" ]] || return 1
  # Fails when the Python that it was made from is gone.
  "$PYTHON" -c '' 2>/dev/null
}

# Prints the commands after which a shell has this project's modules and commands.
activation() {
  if [[ $PYTHON == "$ENVIRONMENT/bin/python" ]]; then
    printf 'source %q\n' "${ENVIRONMENT#"$PWD"/}/bin/activate"
  else
    # An environment of the user's, in which nothing is installed without being asked for.
    printf '%q -m pip install --no-deps --editable %q\n' "$PYTHON" "$ROOT"
    printf 'PATH=%q:$PATH\n' "$(dirname "$PYTHON")"
  fi
}

# Which folder, and everything that decides what its installation looks like.
wanted_project_stamp() {
  printf '%s\n' "$ROOT" "$(<"$ROOT/pyproject.toml")"
}

project_is_installed() {
  [[ -f $ENVIRONMENT/$PROJECT_STAMP ]] || return 1
  [[ $(<"$ENVIRONMENT/$PROJECT_STAMP") == "$(wanted_project_stamp)" ]]
}

# Editable, and from what the environment holds: needs no network.
install_project() {
  [[ -w $ROOT ]] || fail "cannot write $ROOT, which the installation of the project needs"
  choose_pip
  install --no-deps --no-build-isolation --editable "$ROOT"
  wanted_project_stamp >"$ENVIRONMENT/$PROJECT_STAMP"
}

make_environment() {
  remove_own_environment
  choose_base_python
  require_disk_space
  echo "Making the environment in $ENVIRONMENT with Python $BASE_VERSION (once, 1 to 2 minutes)"
  mkdir -p "$ENVIRONMENT" || fail "cannot create $ENVIRONMENT"
  touch "$ENVIRONMENT/$UNFINISHED"
  create_venv
  choose_pip
  install "${REQUIREMENTS[@]}"
  install --no-deps "$TRITON"
  if [[ $BASE_VERSION == 3.11 ]]; then
    install --no-deps --ignore-requires-python "$MEGATRON"
  else
    install "$MEGATRON"
  fi
  wanted_stamp >"$ENVIRONMENT/$STAMP"
  rm "$ENVIRONMENT/$UNFINISHED"
}

# Clears the way for a new environment, but never deletes a folder that this script did not make.
remove_own_environment() {
  [[ -e $ENVIRONMENT ]] || return 0
  [[ -d $ENVIRONMENT && -z $(ls -A "$ENVIRONMENT") ]] && return
  if [[ -f $ENVIRONMENT/$STAMP || -e $ENVIRONMENT/$UNFINISHED ]]; then
    rm -rf "$ENVIRONMENT"
  else
    fail "$ENVIRONMENT exists and is not this script's. Remove it, name another folder in" \
      "ABSORBED_MLA_ENV, or name its interpreter in ABSORBED_MLA_PYTHON to use it as it is"
  fi
}

# Python 3.11 first: the smallest installation where the index has a CPU build of torch for it.
choose_base_python() {
  local candidate version found=()
  for candidate in python3.11 python3.12 python3.13 python3.14 python3 python \
    "$HOME"/.pyenv/versions/3.1[1-4].*/bin/python; do
    # A name on PATH may still not run: pyenv's shims name versions that are not selected.
    version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
      continue
    found+=("$candidate is $version")
    case $version in 3.11 | 3.12 | 3.13 | 3.14) ;; *) continue ;; esac
    if "$candidate" -c 'import venv, ensurepip' 2>/dev/null ||
      "$candidate" -c 'import venv, pip' 2>/dev/null; then
      BASE_PYTHON=$("$candidate" -c 'import sys; print(sys.executable)')
      BASE_VERSION=$version
      return
    fi
    found[-1]+=" without venv and pip"
  done
  local list
  list=$(printf '; %s' "${found[@]-none}")
  fail "Python 3.11 to 3.14 with venv and pip is needed. Found: ${list:2}"
}

require_disk_space() {
  # Measured: 1.8 GB with a CPU build of torch, 4.9 GB with a CUDA build, plus 3 GB of downloads.
  local need_gb=3 free_kb
  [[ $BASE_VERSION == 3.11 ]] || need_gb=8
  free_kb=$(df -Pk "$(dirname "$ENVIRONMENT")" | awk 'NR == 2 { print $4 }')
  if ((free_kb < need_gb * 1000 * 1000)); then
    fail "the environment needs $need_gb GB in $(dirname "$ENVIRONMENT"), where" \
      "$((free_kb / 1000 / 1000)) GB are free. Make room or name another folder in ABSORBED_MLA_ENV"
  fi
}

create_venv() {
  local log=$ENVIRONMENT/install.log
  "$BASE_PYTHON" -m venv "$ENVIRONMENT" >>"$log" 2>&1 ||
    "$BASE_PYTHON" -m venv --without-pip "$ENVIRONMENT" >>"$log" 2>&1 ||
    fail "$BASE_PYTHON could not make a virtual environment: $(tail -n 1 "$log")"
}

# The environment's own pip, or that of the Python which it was made from.
choose_pip() {
  PIP=("$PYTHON" -m pip)
  if ! "$PYTHON" -c 'import pip' 2>/dev/null; then
    choose_base_python
    PIP=("$BASE_PYTHON" -m pip --python "$PYTHON")
  fi
}

install() {
  local log=$ENVIRONMENT/install.log
  "${PIP[@]}" install --no-input --progress-bar off --disable-pip-version-check --retries 2 \
    "$@" >>"$log" 2>&1 && return
  if grep -qi 'no space left' "$log"; then
    fail "the disk filled up while installing into $ENVIRONMENT"
  elif grep -qiE 'NewConnectionError|name resolution|Max retries|ConnectTimeout|ProxyError' "$log"; then
    fail "the package index cannot be reached. The first run needs it; later ones do not." \
      "Details: $log"
  fi
  fail "pip could not install $*: $(grep -i error "$log" | tail -n 1). Details: $log"
}
