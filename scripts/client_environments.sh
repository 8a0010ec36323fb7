# Environments of the server's clients, one each: they want different versions of the same packages.
# Sourced, not executed. Each sees the packages of the environment, and has its own before them.

# What builds vLLM from its source, and what its benchmark client imports.
VLLM_BENCH='setuptools<81 setuptools-scm setuptools-rust wheel jinja2 cbor2 pyzmq aiohttp cachetools'
VLLM_BENCH+=' openai-harmony msgspec cloudpickle pybase64 py-cpuinfo fastapi partial-json-parser'
VLLM_BENCH+=' xgrammar watchfiles orjson'

# Test of tests/clients, and what pip installs for it, in versions that were tried; behind "then",
# what comes without its dependencies: vLLM's source has 47 MB, and with all it needs gigabytes.
CLIENTS=(
  'openai openai>=2,<4'
  'instructor instructor>=1.17,<2'
  'langchain langchain-openai>=1.7,<2'
  'llama_index llama-index-llms-openai-like>=0.8,<0.9'
  'litellm litellm>=1.110,<2'
  'pydantic_ai pydantic-ai-slim[openai]>=2.66,<3'
  'inspect_ai inspect-ai>=0.3.285,<0.4 openai>=3.4'
  'outlines outlines>=1.3,<2'
  'guidance guidance>=0.3.1,<0.4'
  'locust locust>=2.47,<3'
  'guidellm guidellm>=0.8.1,<0.9'
  'lm_eval lm-eval[api]>=0.4.13,<0.5 accelerate'
  "vllm_bench $VLLM_BENCH then --no-build-isolation --no-binary=vllm vllm>=0.33,<0.34"
)

# Runs tests/clients, each client's where it can be installed.
run_clients() {
  local layer=$1 client folder own=$PYTHON packages
  for entry in "${CLIENTS[@]}"; do
    read -r client packages <<<"$entry"
    folder=$ENVIRONMENT.clients/$client
    make_client "$folder" $packages || {
      skip "$layer-$client" "it could not be installed, see $folder.log"
      continue
    }
    PYTHON=$folder/bin/python
    run_pytest "$layer-$client" "tests/clients/test_$client.py"
    PYTHON=$own
  done
}

# make_client FOLDER PACKAGE... [then PACKAGE...] makes the environment once.
make_client() {
  local folder=$1
  [[ ! -f $folder/finished ]] || return 0
  mkdir -p "$(dirname "$folder")" && rm -rf "$folder"
  "$PYTHON" -m venv "$folder" >"$folder.log" 2>&1 || return 1
  local site
  site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/shared.pth"
  shift
  local first=()
  while (($#)) && [[ $1 != then ]]; do first+=("$1") && shift; done
  install_client "$folder" "${first[@]}" || return 1
  # vLLM without kernels and Rust, under the name of its version.
  (($# == 0)) || VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1 CARGO=/nonexistent \
    install_client "$folder" --no-deps "${@:2}" || return 1
  touch "$folder/finished"
}

install_client() {
  "$1/bin/python" -m pip install --no-input --progress-bar off --disable-pip-version-check \
    --retries 1 "${@:2}" >>"$1.log" 2>&1
}
