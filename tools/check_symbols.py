#!/usr/bin/env python3
"""Keeps the release library from ending the process or writing to its streams.

SPDX-License-Identifier: Apache-2.0

Reads the undefined symbols of the library with nm: a service that links it
must not be aborted by it, nor find its text on stdout or stderr.

  tools/check_symbols.py --nm nm --library libvarlane.a
  tools/check_symbols.py --nm nm --compiler g++ --self-test
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

# Whole names, so that __cxa_guard_abort and std::atexit's kin pass.
FORBIDDEN = re.compile(
    r"^(abort|_?exit|_Exit|quick_exit|raise|__assert(_fail|_perror_fail)?"
    r"|_ZSt(21__glibcxx_assert_fail|20__replacement_assert)\w*"
    r"|_ZN3hwy5Abort\w*"
    r"|_ZSt4(cout|cerr|clog)|stdout|stderr|v?printf|puts|putchar|perror"
    r"|__v?printf_chk)$")


def undefined_symbols(nm, library):
    """[(object file, symbol)] of what the library needs from others."""
    command = [nm, "-A", "-u"]
    if ".so" in library.name:
        command.append("-D")
    output = subprocess.run(command + [str(library)], check=True,
                            capture_output=True, text=True).stdout
    found = []
    for line in output.splitlines():
        match = re.match(r"^(.*):\s+[UwvC]\s+([^\s@]+)", line)
        if match:
            found.append((match.group(1).split(":")[-1], match.group(2)))
    return found


def violations(nm, library):
    symbols = undefined_symbols(nm, library)
    return len(symbols), [f"{where} needs {symbol}" for where, symbol
                          in symbols if FORBIDDEN.match(symbol)]


# (source, forbidden symbol or None)
FIXTURES = [
    ("#include <cstdlib>\nvoid f() { std::abort(); }", "abort"),
    ("#include <cstdlib>\nvoid f(int x) { std::exit(x); }", "exit"),
    ("#include <cassert>\nvoid f(int x) { assert(x); }", "__assert_fail"),
    ("#include <cstdio>\nvoid f() { std::puts(\"x\"); }", "puts"),
    ("#include <iostream>\nvoid f() { std::cerr << 1; }", "_ZSt4cerr"),
    # A function-local static needs __cxa_guard_abort: allowed.
    ("int g();\nint f() { static int x = g(); return x; }", None),
]


def self_test(nm, compiler):
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        source = pathlib.Path(name) / "fixture.cc"
        binary = pathlib.Path(name) / "fixture.o"
        for text, expected in FIXTURES:
            source.write_text(text + "\n", encoding="utf-8")
            subprocess.run([compiler, "-std=c++20", "-O2", "-c", str(source),
                            "-o", str(binary)], check=True)
            num_symbols, found = violations(nm, binary)
            right = num_symbols > 0 and (
                not found if expected is None
                else len(found) == 1 and found[0].endswith(" " + expected))
            if not right:
                failures += 1
                print(f"{text!r}: expected {expected}, got {found}")
    print(f"{len(FIXTURES)} fixtures, {failures} wrong")
    return 1 if failures else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--library", type=pathlib.Path)
    parser.add_argument("--compiler", default="c++")
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    if options.self_test:
        return self_test(options.nm, options.compiler)
    if options.library is None:
        parser.error("--library or --self-test is needed")
    num_symbols, found = violations(options.nm, options.library)
    for violation in found:
        print(violation)
    print(f"{num_symbols} undefined symbols, {len(found)} forbidden")
    return 1 if found or num_symbols == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
