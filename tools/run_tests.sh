#!/usr/bin/env bash
# The second command: the same set-up as the first, then every test.
# SPDX-License-Identifier: Apache-2.0
#
# Extra arguments go to ctest, e.g. tools/run_tests.sh -L kernels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
[[ -f build/release/build.ninja ]] || cmake --preset release
cmake --build --preset release
ctest --preset release --parallel "$(nproc)" "$@"
