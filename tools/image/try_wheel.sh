#!/bin/sh
# Build the wheel, install it in a fresh environment, and train the model that it brings for ten steps:
#   tools/image/try_wheel.sh DIRECTORY
#
# Reads   the environment of $PYTHON (.venv): its packages are found after the wheel, for pip would fetch gigabytes
# Writes  DIRECTORY
# Exits   with 77 and the reason where no index has setuptools, which builds it
set -eu
checkout=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$checkout/.venv/bin/python}
mkdir -p "$1/tree" # a build writes into its tree
cd "$1"
for name in laminar configs pyproject.toml README.md LICENSE; do cp -a "$checkout/$name" tree; done
said=$("$python" -m pip wheel --quiet --no-deps -w . ./tree 2>&1) || case "$said" in
  *"No matching distribution"*) echo "skipped: no index with setuptools, which builds a wheel" >&2; exit 77 ;;
  *) echo "$said" >&2; exit 1 ;;
esac
"$python" -m venv venv
venv/bin/pip install --quiet --no-deps --no-index ./*.whl
others=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for site in venv/lib/python*/site-packages; do
  echo "import site; site.addsitedir('$others')" >"$site/beside.pth"
done
unset PYTHONPATH
file=$(venv/bin/python -P -c 'import laminar; print(laminar.__file__)')
case "$file" in "$PWD"/venv/*) ;; *) echo "$file is not of the wheel" >&2; exit 1 ;; esac
export PATH="$PWD/venv/bin:/usr/bin:/bin"
laminar --version
laminar quickstart --max-steps 10
laminar audit runs/quickstart
