# Sourced by the scripts: where things are, how to say so, how to configure and build.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# The one folder that the scripts write to outside the tree and outside the system's packages.
CACHE=${SHARDMLP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/shardmlp}
VENV=${SHARDMLP_VENV:-$CACHE/venv}

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

# configure PRESET
configure() {
  (cd "$ROOT" && cmake --preset "$1" -DPython_EXECUTABLE="$VENV/bin/python" >"$ROOT/build/$1.configure.log" 2>&1) || {
    cat "$ROOT/build/$1.configure.log" >&2
    die "cmake --preset $1 failed"
  }
}

# build PRESET [TARGET...]
build() {
  local preset=$1
  shift
  mkdir -p "$ROOT/build"
  configure "$preset"
  (cd "$ROOT" && cmake --build --preset "$preset" --parallel "$(job_count)" ${1+--target "$@"}) ||
    die "the $preset build failed; the compiler's message is above"
}
