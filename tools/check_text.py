#!/usr/bin/env python3
"""Keeps the text of the tree plain: what every editor and terminal shows alike.

SPDX-License-Identifier: Apache-2.0

  tools/check_text.py              reports every violation; 1 if any
  tools/check_text.py --self-test  proves that each rule can fail
"""

import argparse
import pathlib
import re
import sys
import tempfile

import source_tree

# Data of tests may be broken on purpose.
EXEMPT = re.compile(r"^tests/(.*/)?(data|fixtures|testdata)/")
# Spelled in two parts so that this file passes its own rule.
LOOSE_ENDS = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
MAX_COLUMNS = 80


def expected_guard(path):
    name = path.removeprefix("include/varlane/").removesuffix(".in")
    return "VARLANE_" + re.sub(r"[^A-Z0-9]", "_", name.upper()) + "_"


def check_lines(path, lines):
    for number, line in enumerate(lines, 1):
        if not line.isascii():
            character = next(c for c in line if not c.isascii())
            yield number, f"not ASCII: U+{ord(character):04X}"
        if "\t" in line:
            yield number, "a tab"
        if line != line.rstrip():
            yield number, "blanks at the end of the line"
        if path.endswith(source_tree.CODE):
            if len(line) > MAX_COLUMNS and "://" not in line:
                yield number, f"{len(line)} columns, at most {MAX_COLUMNS}"
            if LOOSE_ENDS.search(line):
                yield number, "a loose end: finish it or open an issue"


def check_file(path, data):
    """Yields (line, complaint)."""
    if b"\r" in data:
        yield data[:data.index(b"\r")].count(b"\n") + 1, "a carriage return"
        return
    if data and not data.endswith(b"\n"):
        yield data.count(b"\n") + 1, "no line break at the end of the file"
    text = data.decode("utf-8", errors="replace")
    yield from check_lines(path, text.splitlines())
    if path.endswith(source_tree.CODE):
        if "SPDX-License-Identifier: Apache-2.0" not in text[:2500]:
            yield 1, "no SPDX-License-Identifier: Apache-2.0"
    if path.endswith((".h", ".h.in")):
        guard = expected_guard(path)
        # A per-target file toggles a guard of its own shape.
        if not path.endswith("-inl.h") and not re.search(
                rf"^#ifndef {guard}$", text, re.M):
            yield 1, f"no include guard {guard}"


def check_tree(root):
    complaints = []
    paths = [path for path in source_tree.files(source_tree.TEXT, root)
             if not EXEMPT.match(path)]
    for path in paths:
        complaints += [f"{path}:{line}: {complaint}" for line, complaint
                       in check_file(path, (root / path).read_bytes())]
    return len(paths), complaints


SPDX = b"// SPDX-License-Identifier: Apache-2.0\n"
FIXTURES = [
    ("base/a.cc", SPDX + b"int x;\n", None),
    ("base/a.cc", b"int x;\n", "no SPDX"),
    ("base/a.cc", SPDX + b"// caf\xc3\xa9\n", "U+00E9"),
    ("docs/a.md", b"an em dash \xe2\x80\x94\n", "U+2014"),
    ("base/a.cc", SPDX + b"\tint x;\n", "a tab"),
    ("base/a.cc", SPDX + b"int x; \n", "blanks at the end"),
    ("base/a.cc", SPDX + b"int x;\r\n", "carriage return"),
    ("base/a.cc", SPDX + b"int x;", "no line break"),
    ("base/a.cc", SPDX + b"// TO" b"DO: later\n", "loose end"),
    ("base/a.cc", SPDX + b"// " + b"x" * 78 + b"\n", "81 columns"),
    ("base/a.h", SPDX + b"#ifndef VARLANE_A_H_\n", "VARLANE_BASE_A_H_"),
    ("base/a.h", SPDX + b"#ifndef VARLANE_BASE_A_H_\n", None),
    ("include/varlane/a.h", SPDX + b"#ifndef VARLANE_A_H_\n", None),
]


def self_test():
    failures = 0
    for path, data, expected in FIXTURES:
        with tempfile.TemporaryDirectory() as name:
            file = pathlib.Path(name) / path
            file.parent.mkdir(parents=True)
            file.write_bytes(data)
            num_files, complaints = check_tree(pathlib.Path(name))
        right = num_files == 1 and (
            not complaints if expected is None
            else len(complaints) == 1 and expected in complaints[0])
        if not right:
            failures += 1
            print(f"{path}: expected {expected!r}, got {complaints}")
    print(f"{len(FIXTURES)} fixtures, {failures} wrong")
    return 1 if failures else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--self-test", action="store_true")
    if parser.parse_args().self_test:
        return self_test()
    num_files, complaints = check_tree(source_tree.ROOT)
    for complaint in complaints:
        print(complaint)
    print(f"{num_files} files, {len(complaints)} violations")
    return 1 if complaints or num_files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
