#!/bin/sh
# Install this checkout on Debian 12, Ubuntu 24.04 or newer, as root:
#   tools/image/install.sh [cpu|cuda] [DIRECTORY]
#
# Reads   requirements/cpu.lock or cuda.lock, which has vLLM, too; TORCH_INDEX, where torch for cpu comes from
# Writes  a virtual environment, /opt/laminar by default; a link to its `laminar` in /usr/local/bin
set -eu
checkout=$(cd "$(dirname "$0")/../.." && pwd)
kind=${1:-cuda}
environment=${2:-/opt/laminar}
lock=$checkout/requirements/$kind.lock
[ -f "$lock" ] || { echo "install.sh: $kind is unknown; give cpu or cuda" >&2; exit 2; }

# A few packages come as source; vLLM compiles kernels when it runs.
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
  ca-certificates gcc libc6-dev python3-dev python3-venv
rm -rf /var/lib/apt/lists/*

export PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$environment"
[ "$kind" = cuda ] || "$environment/bin/pip" install --quiet --no-deps "$(grep '^torch==' "$lock")" \
  --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
"$environment/bin/pip" install --quiet --no-deps -r "$lock" "$checkout"
"$environment/bin/pip" check
ln -sf "$environment/bin/laminar" /usr/local/bin/laminar
laminar --version
