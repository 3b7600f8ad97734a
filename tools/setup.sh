#!/usr/bin/env bash
# Installs the Debian packages that Varlane needs and this machine lacks.
# SPDX-License-Identifier: Apache-2.0
#
#   tools/setup.sh        what building and testing needs
#   tools/setup.sh lint   also what the checks of .ci/run need
#
# Debian 12 and 13, as root or with sudo. When nothing is missing it takes
# milliseconds and touches neither the network nor the disk.
set -euo pipefail

packages=(
  g++ cmake ninja-build pkg-config python3
  libtbb-dev libhwloc-dev libhwy-dev
  libgtest-dev libbenchmark-dev
  libcli11-dev nlohmann-json3-dev libfmt-dev
)
# The NUMA tests' virtual machines.
if [[ $(uname -m) == x86_64 ]]; then
  packages+=(qemu-system-x86 cpio)
fi
if [[ ${1:-} == lint ]]; then
  # clang and its runtime: the fuzz targets are libFuzzer programs.
  packages+=(clang-format clang-tidy clang libclang-rt-dev)
fi

if ! command -v dpkg-query >/dev/null; then
  echo "setup: not a Debian system; what is needed here, by its Debian names:" \
    "${packages[*]}" >&2
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>&1 || true)
  [[ $status == installed ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "setup: root or sudo is needed to install: ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "setup: installing ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
