#!/usr/bin/env bash
# The first command: from a bare Debian 12 or 13 to a running Varlane.
# SPDX-License-Identifier: Apache-2.0
#
# Installs what is missing, builds the release preset into build/release, shows
# what the library sees of this machine, plans a KV pool for it, and replays a
# synthetic serving trace through the whole system. Later runs start at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

heading() { printf '\n== %s\n' "$*"; }

tools/setup.sh
heading "Building (release, into build/release)"
[[ -f build/release/build.ninja ]] || cmake --preset release
cmake --build --preset release --target varlane_cli
varlane=build/release/tools/varlane

heading "varlane info: this machine, as the runtime will use it"
"$varlane" info
heading "varlane plan: the KV pool that fits into this machine's RAM"
# A refusal is an answer too: it says what would fit.
"$varlane" plan || true
heading "varlane replay --demo: a serving trace through the whole system"
"$varlane" replay --demo
