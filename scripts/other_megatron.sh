# Other releases of Megatron-Core beside the one of scripts/environment.sh. Sourced, not executed.
#
# A release is installed into a folder for PYTHONPATH that holds nothing else: torch and the rest are
# the environment's. The folder is made once (18 MB, needs the package index). Without an index the
# layer is skipped; in CI that is an error where the release is known.

OLD_MEGATRON=0.18.0

# Sets ABSORBED_MLA_OLD_MEGATRON, the folder of the oldest release that loads what we convert.
find_old_megatron() {
  [[ -z ${ABSORBED_MLA_OLD_MEGATRON:-} ]] || return 0
  find_megatron old-megatron "$OLD_MEGATRON" || return 1
  export ABSORBED_MLA_OLD_MEGATRON=$MEGATRON_FOLDER
}

# Sets MEGATRON_FOLDER, the folder of the newest release; 1 if the environment has it already.
find_newest_megatron() {
  if [[ -n ${ABSORBED_MLA_NEWEST_MEGATRON:-} ]]; then
    MEGATRON_FOLDER=$ABSORBED_MLA_NEWEST_MEGATRON
    return 0
  fi
  local newest installed
  # Of wheels, and for a Python that all releases take: pip would hide those that ask for 3.12.
  newest=$("$PYTHON" -m pip index versions megatron-core --disable-pip-version-check \
    --python-version 3.13 --only-binary :all: 2>/dev/null | sed -n '1s/.*(\(.*\))/\1/p') || true
  if [[ -z $newest ]]; then
    skip newest-megatron "there is no package index to ask"
    return 1
  fi
  installed=$("$PYTHON" -c 'from importlib.metadata import version; print(version("megatron-core"))')
  if [[ $newest == "$installed" ]]; then
    skip newest-megatron "megatron-core $newest, of the environment, is the newest"
    return 1
  fi
  find_megatron newest-megatron "$newest"
}

# Sets MEGATRON_FOLDER, a snapshot of Megatron-LM's branch dev: the one that the variable names, or a
# clone made once. In CI, too, the layer is skipped where the repository cannot be reached.
find_dev_megatron() {
  MEGATRON_FOLDER=${ABSORBED_MLA_DEV_MEGATRON:-$ENVIRONMENT.megatron-dev}
  [[ ! -d $MEGATRON_FOLDER ]] || return 0
  [[ -z ${ABSORBED_MLA_DEV_MEGATRON:-} ]] ||
    fail "ABSORBED_MLA_DEV_MEGATRON=$ABSORBED_MLA_DEV_MEGATRON is no folder"
  rm -rf "$MEGATRON_FOLDER.unfinished"
  timeout 120 git clone -q --depth 1 --branch dev https://github.com/NVIDIA/Megatron-LM \
    "$MEGATRON_FOLDER.unfinished" >"$MEGATRON_FOLDER.log" 2>&1 || {
    skip dev-megatron "Megatron-LM's repository cannot be reached, see $MEGATRON_FOLDER.log"
    return 1
  }
  mv "$MEGATRON_FOLDER.unfinished" "$MEGATRON_FOLDER"
}

# A source tree lacks the compiled helpers of Megatron's datasets: the release's, of the same source.
take_dataset_helpers() {
  local ours target=$1/megatron/core/datasets
  ours=$("$PYTHON" -c 'import megatron.core.datasets as d; print(d.__path__[0])')
  if ! compgen -G "$target/helpers_cpp*.so" >/dev/null; then
    cmp -s "$ours/helpers.cpp" "$target/helpers.cpp" ||
      fail "$target/helpers.cpp is not the release's: compile it there (make)"
    cp "$ours"/helpers_cpp*.so "$target/"
  fi
}

# find_megatron LAYER VERSION sets MEGATRON_FOLDER, or skips the layer.
find_megatron() {
  local layer=$1 release=megatron-core==$2
  MEGATRON_FOLDER=$ENVIRONMENT.megatron-core-$2
  [[ ! -d $MEGATRON_FOLDER ]] || return 0
  make_megatron "$release" "$MEGATRON_FOLDER" && return 0
  [[ -z ${CI:-} ]] ||
    fail "$release could not be installed: $(tail -n 1 "$MEGATRON_FOLDER.log")"
  skip "$layer" "$release could not be installed, see $MEGATRON_FOLDER.log"
  return 1
}

# Under another name until it is complete.
make_megatron() {
  echo "Installing $1 into $2 (once)"
  mkdir -p "$(dirname "$2")" && rm -rf "$2.unfinished"
  "$PYTHON" -m pip install --no-input --progress-bar off --disable-pip-version-check --retries 1 \
    --no-deps --ignore-requires-python --target "$2.unfinished" "$1" >"$2.log" 2>&1 &&
    mv "$2.unfinished" "$2"
}
