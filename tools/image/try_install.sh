#!/bin/sh
# Install this checkout with install.sh in a clean root, then run the doctor and ten steps of the quickstart:
#   tools/image/try_install.sh DIRECTORY
#
# Reads   PIP_*, TORCH_INDEX, http_proxy and https_proxy, for the root as well; directories of PIP_FIND_LINKS
# Writes  the root, DIRECTORY, made by debootstrap; its mounts end with this process
# Exits   with 77 and the reason where no root can be made
set -eu
root=$1
checkout=$(cd "$(dirname "$0")/../.." && pwd)
skip() { echo "skipped: $*" >&2; exit 77; }
if [ "${2:-}" != inside ]; then
  [ "$(id -u)" = 0 ] || skip "a clean root needs root"
  command -v debootstrap >/dev/null || skip "a clean root needs debootstrap"
  unshare --mount true || skip "no namespace for mounts"
  said=$(debootstrap --variant=minbase bookworm "$root" 2>&1) || skip "debootstrap: $(echo "$said" | tail -n 1)"
  exec unshare --mount --pid --fork "$0" "$root" inside
fi

mkdir -p "$root/usr/src/laminar"
for name in laminar configs requirements tools pyproject.toml README.md LICENSE; do
  cp -a "$checkout/$name" "$root/usr/src/laminar"
done
echo "127.0.0.1 localhost $(hostname)" >"$root/etc/hosts" # as a container has it
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/dev/shm"
for links in ${PIP_FIND_LINKS:-}; do
  [ ! -d "$links" ] || { mkdir -p "$root$links" && mount --bind -o ro "$links" "$root$links"; }
done
[ -z "${PIP_CERT:-}" ] || cp "$PIP_CERT" "$root/etc/proxy.crt"
env | grep -E '^(PIP_|TORCH_INDEX=|https?_proxy=)' | sed "s/'/'\\\\''/g; s/=\(.*\)/='\1'/; s/^/export /" >"$root/etc/pip.env"
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root chroot "$root" sh -ec '
  . /etc/pip.env
  [ ! -f /etc/proxy.crt ] || export PIP_CERT=/etc/proxy.crt
  /usr/src/laminar/tools/image/install.sh cpu
  cd /root
  laminar doctor
  laminar quickstart --max-steps 10
  laminar audit runs/quickstart
'
