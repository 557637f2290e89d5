#!/usr/bin/env bash
# Sourced by the scripts: where things are, how to say so, how to configure and build.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# The one folder that the scripts write to outside the tree and outside the system's packages.
CACHE=${SHARDMLP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/shardmlp}
VENV=${SHARDMLP_VENV:-$CACHE/venv}
SERVER=$ROOT/build/release/server/shardmlp-server
RESULTS=$ROOT/build/test-results

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 1
}

# Compiler processes at a time: one a core, but 1.5 GiB of memory for each. CMAKE_BUILD_PARALLEL_LEVEL overrides it.
job_count() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable:/ {print int($2 / 1572864)}' /proc/meminfo)
  [ "$memory" -ge 1 ] || memory=1
  echo "${CMAKE_BUILD_PARALLEL_LEVEL:-$((cores < memory ? cores : memory))}"
}

# build PRESET [TARGET...]: configures and builds; progress and errors go to stderr. Without targets, the preset's own.
build() {
  local preset=$1 log=$ROOT/build/$1.configure.log
  shift
  mkdir -p "$ROOT/build"
  cd "$ROOT"
  if ! cmake --preset "$preset" -DPython_EXECUTABLE="$VENV/bin/python" >"$log" 2>&1; then
    cat "$log" >&2
    die "cmake --preset $preset failed; its messages are above"
  fi
  cmake --build --preset "$preset" --parallel "$(job_count)" ${1+--target "$@"} >&2 ||
    die "the $preset build failed; the compiler's message is above"
}

# Python with the package and the server of the release build.
PYTHON=(env "PYTHONPATH=$ROOT/build/release/python${PYTHONPATH:+:$PYTHONPATH}" "SHARDMLP_SERVER=$SERVER"
  "$VENV/bin/python")

# run_ctest PRESET NAME [ARGS...]: the preset's tests; results go to $RESULTS/NAME.xml.
run_ctest() {
  local preset=$1 name=$2
  shift 2
  (cd "$ROOT" && ctest --preset "$preset" --output-junit "$RESULTS/$name.xml" "$@")
}

# run_pytest FOLDER NAME [ARGS...]
run_pytest() {
  local folder=$1 name=$2
  shift 2
  (cd "$ROOT" && "${PYTHON[@]}" -m pytest -q --timeout 900 --junitxml "$RESULTS/$name.xml" "$folder" "$@")
}

# test_totals FILE...: adds up results, "N passed, N failed, N skipped".
test_totals() { "$VENV/bin/python" "$ROOT/scripts/lib/count_tests.py" "$@"; }
