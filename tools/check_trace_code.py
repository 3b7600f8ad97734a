#!/usr/bin/env python3
"""Keeps tracing free where it is off: the same code with and without it.

SPDX-License-Identifier: Apache-2.0

Compiles the sources of the hot loops as they are, and again with every line
that traces cut out, and compares the functions that untraced launches run:
their instructions, byte by byte, and whom they call.

  tools/check_trace_code.py --compiler g++ --include build/include
  tools/check_trace_code.py --compiler g++ --include build/include --self-test
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

UNTRACED = "<varlane::FunctionRef<void (varlane::Threadgroup const&)> >("

# (source, loop, [(file, what to cut out of it)]). The loops are those of an
# untraced launch of any grid, and of attention: functions that begin so, as far
# as they were not inlined into each other.
CASES = [
    ("attention/run.cc", ["void varlane::PlanRun::Attend<false>("],
     [("attention/run.cc", r"^ *if constexpr \(kTraced\) .*;\n"),
      ("attention/run.cc", r"^template void PlanRun::Attend<true>.*;\n"),
      ("attention/run.h", r"^  void RunTraced.*\n"),
      ("attention/run.cc", r"^  const auto traced = .*\n"
                           r"^  const FunctionRef.*traced_body = .*\n"
                           r"^  launch.traced_body = .*\n")]),
    ("runtime/launch.cc",
     [f"bool varlane::{name}{UNTRACED}"
      for name in ("DrainGrid", "DrainRange", "RunClaim")],
     [("runtime/launch.h", r"^    if \(trace->tracer != nullptr\) \{\n"
                           r"^      return DrainGridTraced.*\n^    \}\n")]),
]

# The traced twins, which must not pass for the same.
TWINS = {
    "attention/run.cc": "void varlane::PlanRun::Attend<true>(",
    "runtime/launch.cc":
        "bool varlane::DrainGrid<varlane::TracedBody<",
}


def compile_source(compiler, includes, source, out):
    flags = ["-std=c++20", "-O3", "-DNDEBUG", "-DVARLANE_CHECK_LEVEL=0",
             "-ffunction-sections"]
    if "clang" not in compiler:
        # Or twins would become one, and parts local to the file.
        flags += ["-fno-ipa-icf", "-fno-ipa-sra"]
    for include in includes:
        flags += ["-iquote", str(include)]
    subprocess.run([compiler, *flags, "-c", str(source), "-o", str(out)],
                   check=True)


def code_of(binary, names):
    """[lines] of the functions' bytes and references, cold parts too."""
    text = subprocess.run(["objdump", "-drwC", str(binary)], check=True,
                          capture_output=True, text=True).stdout
    code = []
    is_wanted = False
    for line in text.splitlines():
        head = re.match(r"^[0-9a-f]+ <(.*)>:$", line)
        if head:
            is_wanted = head.group(1).startswith(tuple(names))
        elif is_wanted and line.startswith(" "):
            # Which constant or part of the file is meant may have moved.
            line = re.sub(r"(\.L\w+|\.rodata\S*|\.text\S*)[+-]0x[0-9a-f]+",
                          r"\1", line.split("\t#")[0])
            code.append(re.sub(r"\.LC\d+", ".LC", line))
    return code


def cut(tree, cuts):
    """Writes the sources without their tracing below `tree`."""
    for name, pattern in cuts:
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (path if path.exists() else ROOT / name).read_text("utf-8")
        text, count = re.subn(pattern, "", text, flags=re.M)
        if count == 0:
            return f"{name}: {pattern!r} is not there: rewrite the cut"
        path.write_text(text, encoding="utf-8")
    return None


def check(compiler, include, case, names):
    """None, or what is wrong: `names` as it is against the loop without."""
    source, plain_names, cuts = case
    with tempfile.TemporaryDirectory() as name:
        tree = pathlib.Path(name)
        error = cut(tree, cuts)
        if error:
            return error
        without_source = tree / source
        if not without_source.exists():
            without_source = ROOT / source
        compile_source(compiler, [ROOT, ROOT / "include", include],
                       ROOT / source, tree / "with.o")
        compile_source(compiler, [tree, ROOT, ROOT / "include", include],
                       without_source, tree / "without.o")
        here = code_of(tree / "with.o", names)
        plain = code_of(tree / "without.o", plain_names)
    if not here or not plain:
        return f"{source}: there is no function {names[0]}...)"
    if here != plain:
        return (f"{source}: {names[0]}...) has other code where tracing is "
                f"cut out: {len(here)} lines against {len(plain)}")
    print(f"{source}: {names[0]}...) is the same {len(plain)} lines")
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compiler", default="c++")
    parser.add_argument("--include", type=pathlib.Path, required=True,
                        help="where varlane/version.h was made")
    parser.add_argument("--self-test", action="store_true",
                        help="the traced functions must be told apart")
    options = parser.parse_args()
    failures = 0
    for case in CASES:
        names = [TWINS[case[0]]] if options.self_test else case[1]
        error = check(options.compiler, options.include, case, names)
        if options.self_test:
            told = error is not None and "has other code" in error
            print(f"{case[0]}: {error}")
            failures += 0 if told else 1
        elif error:
            print(error)
            failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
