#!/usr/bin/env bash
# Resolve requirements/cpu.lock and cuda.lock for Python 3.11 to 3.13, from the metadata of packages alone:
#   lock.sh UV          write them
#   lock.sh UV --check  fail if pyproject.toml or constraints.txt asks for others; skipped without an index
# Versions of a lock are kept as long as they fit. cpu.lock has neither vLLM nor CUDA: its torch comes from
# https://download.pytorch.org/whl/cpu.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$1 mode=${2:-}
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
machines="((platform_machine == 'aarch64' and sys_platform == 'linux') or (platform_machine == 'x86_64' and sys_platform == 'linux'))"

resolve() { # NAME LINES-TO-LEAVE-OUT EXTRA...
  local lock=requirements/$1.lock made=$new/$1.txt cut=$2 said
  shift 2
  [ ! -f "$lock" ] || cp "$lock" "$made"
  if ! said=$($uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header \
    -c constraints.txt "${@/#/--extra=}" pyproject.toml -o "$made" 2>&1 >/dev/null); then
    case "$said" in *"Failed to fetch"* | *"network was disabled"*) echo "skipped $lock: no package index" && return ;; esac
    echo "$said" >&2
    return 1
  fi
  echo "# Made by requirements/lock.sh" >"$made.lock"
  grep -Ev "$cut" "$made" | sed "s/ ; python_full_version < '3.14' and $machines//; s/ and $machines//" >>"$made.lock"
  if [ "$mode" != --check ]; then
    cp "$made.lock" "$lock"
  elif ! diff -u "$lock" "$made.lock" >&2; then
    echo "$lock does not fit pyproject.toml and constraints.txt: make lock" >&2
    return 1
  fi
  echo "resolved $lock: $(grep -c == "$lock") packages"
}

resolve cpu '^(#|cuda-|nvidia-|triton)' agents lora view wandb &
cpu=$! code=0
resolve cuda '^#' all || code=1
wait $cpu || code=1
exit $code
