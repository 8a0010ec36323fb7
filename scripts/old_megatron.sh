# An older Megatron-Core beside the environment of scripts/environment.sh. Sourced, not executed.
#
# find_old_megatron exports ABSORBED_MLA_OLD_MEGATRON, a folder for PYTHONPATH that holds nothing but
# that release: torch and the rest are the environment's. The folder is made once (18 MB, needs the
# package index). Without an index the layer is skipped, but in CI that is an error.

OLD_MEGATRON=megatron-core==0.18.0

find_old_megatron() {
  [[ -z ${ABSORBED_MLA_OLD_MEGATRON:-} ]] || return 0
  local folder=$ENVIRONMENT.${OLD_MEGATRON/==/-}
  if [[ ! -d $folder ]] && ! make_old_megatron "$folder"; then
    [[ -z ${CI:-} ]] || fail "$OLD_MEGATRON could not be installed: $(tail -n 1 "$folder.log")"
    skip old-megatron "$OLD_MEGATRON could not be installed, see $folder.log"
    return 1
  fi
  export ABSORBED_MLA_OLD_MEGATRON=$folder
}

# Under another name until it is complete.
make_old_megatron() {
  echo "Installing $OLD_MEGATRON into $1 (once)"
  mkdir -p "$(dirname "$1")" && rm -rf "$1.unfinished"
  "$PYTHON" -m pip install --no-input --progress-bar off --disable-pip-version-check --retries 1 \
    --no-deps --ignore-requires-python --target "$1.unfinished" "$OLD_MEGATRON" >"$1.log" 2>&1 &&
    mv "$1.unfinished" "$1"
}
