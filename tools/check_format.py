#!/usr/bin/env python3
"""Reports (or, with --fix, repairs) C++ files that clang-format would change.

SPDX-License-Identifier: Apache-2.0

  tools/check_format.py [--clang-format PATH] [--fix]
"""

import argparse
import subprocess
import sys

import source_tree


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clang-format", default="clang-format")
    parser.add_argument("--fix", action="store_true")
    options = parser.parse_args()
    paths = [path for path in source_tree.files(source_tree.CPP)
             if not path.endswith(".in")]
    if options.fix:
        return subprocess.run([options.clang_format, "-i", *paths],
                              cwd=source_tree.ROOT, check=False).returncode
    result = subprocess.run(
        [options.clang_format, "--dry-run", "-ferror-limit=1", *paths],
        cwd=source_tree.ROOT, check=False, capture_output=True, text=True)
    # One line a place: "base/a.cc:3:1: warning: code should be ...".
    places = [line for line in result.stderr.splitlines()
              if "clang-format-violations" in line]
    changed = sorted({place.split(":")[0] for place in places})
    for path in changed:
        print(f"{path}: clang-format -i would change it")
    if result.returncode != 0 and not changed:
        print(result.stderr)
    print(f"{len(paths)} files, {len(changed)} to format")
    return 1 if changed or result.returncode != 0 else 0


if __name__ == "__main__":
    sys.exit(main())
