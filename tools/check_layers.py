#!/usr/bin/env python3
"""Keeps the architecture true: arrows point down, fences hold.

SPDX-License-Identifier: Apache-2.0

  tools/check_layers.py [--root DIR]   reports every violation; 1 if any
  tools/check_layers.py --self-test    proves that each rule can fail

Sources: each .cc of a layer is named in CMakeLists.txt, whose list is read as
documentation. Arrows: what a folder may include of ours (ALLOWED_FOLDERS), and
up to which layer of the public headers (PUBLIC_LAYER). Fences: headers and
functions that belong to named folders only. Comments and strings do not count.
"""

import argparse
import pathlib
import re
import sys
import tempfile

# Each public header's layer; a new header must be entered here.
PUBLIC_LAYER = {
    "dtype.h": 0, "environment.h": 0, "export.h": 0, "function_ref.h": 0,
    "kv_layout.h": 0, "log.h": 0, "reference.h": 0, "status.h": 0,
    "version.h": 0,
    "runtime.h": 1, "graph.h": 1, "trace.h": 1, "huge_page_allocator.h": 1,
    "memory_account.h": 2, "memory_budget.h": 2, "kv_pool.h": 2,
    "pressure.h": 2, "session.h": 2, "swap.h": 2,
    "attention.h": 3, "limits.h": 3,
    "kv_ops.h": 3, "merge_states.h": 3,
    "scheduler.h": 4, "serving_pressure.h": 4, "metrics.h": 4,
}

# Our folders that a folder may include with quotes.
ALLOWED_FOLDERS = {
    "base": {"base"},
    "runtime": {"base", "runtime"},
    "kernels": {"base", "kernels"},
    "memory": {"base", "runtime", "memory"},
    "attention": {"base", "runtime", "kernels", "memory", "attention"},
    "serving": {"base", "memory", "attention", "serving"},
    "include": set(),
    # The public API only, as any service; bench/'s workloads know no more.
    "tools": {"tools", "bench"},
    "docs": set(),
    "bench": {"base", "runtime", "kernels", "memory", "attention", "serving",
              "bench"},
    "tests": {"base", "runtime", "kernels", "memory", "attention", "serving",
              "tests", "tools"},
}

# The highest layer of public header that a folder may include.
FOLDER_LAYER = {
    "base": 0, "runtime": 1, "kernels": 0, "memory": 2, "attention": 3,
    "serving": 4, "tools": 4, "docs": 4, "bench": 4, "tests": 4,
}

# (what, include pattern, where it may stand). A place is a folder or a file
# name's beginning.
INCLUDE_FENCES = [
    ("hwloc", r"hwloc(\.h|/)", ("runtime/", "tests/runtime_")),
    ("oneTBB", r"(tbb|oneapi/tbb)(\.h|/)", ("runtime/", "tests/runtime_")),
    ("oneDNN", r"oneapi/dnnl/", ("bench/",)),
    ("Highway", r"hwy/", ("kernels/", "tests/kernels_", "bench/kernels_")),
    ("threads and locks",
     r"(thread|mutex|shared_mutex|condition_variable|semaphore|latch|barrier"
     r"|future|pthread\.h)$",
     ("base/log.cc", "runtime/", "memory/", "serving/", "tools/", "tests/",
      "bench/")),
    ("CLI11", r"CLI/", ("tools/", "tests/tools_")),
    ("nlohmann-json", r"nlohmann/", ("tools/", "tests/tools_")),
    ("fmt", r"fmt/", ("tools/", "tests/tools_")),
    ("GoogleTest", r"g(test|mock)/", ("tests/",)),
    ("Google Benchmark", r"benchmark/", ("bench/",)),
]

# (what, pattern in code, where it may stand).
CODE_FENCES = [
    ("getenv", r"\b(secure_)?getenv\s*\(|\benviron\b",
     ("base/env.cc", "tests/")),
]

# The layers whose sources make the library.
LIBRARY = ("base", "runtime", "kernels", "memory", "attention", "serving")

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)
COMMENT_OR_STRING = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)


def blank_out(match):
    """Keeps line numbers: everything but line breaks becomes a blank."""
    return re.sub(r"[^\n]", " ", match.group(0))


def without_comments(text):
    """Blanks comments; leaves strings, since #include needs its own."""
    def keep_strings(match):
        return match.group(0) if match.group(0)[0] == '"' else blank_out(match)
    return COMMENT_OR_STRING.sub(keep_strings, text)


def stands_in(path, places):
    return any(path == place or path.startswith(place) for place in places)


def check_quoted(path, folder, name):
    """One #include of ours, or of somebody else's in quotes."""
    if name.startswith("varlane/"):
        header = name[len("varlane/"):]
        if header not in PUBLIC_LAYER:
            return f'"{name}" has no layer in PUBLIC_LAYER'
        limit = (PUBLIC_LAYER.get(path.split("/")[-1].removesuffix(".in"), 0)
                 if folder == "include" else FOLDER_LAYER[folder])
        if PUBLIC_LAYER[header] > limit:
            return (f'"{name}" is layer {PUBLIC_LAYER[header]}, but {path} may '
                    f"include up to layer {limit}")
        return None
    target = name.split("/")[0] if "/" in name else ""
    if target in ALLOWED_FOLDERS:
        if target not in ALLOWED_FOLDERS[folder]:
            return f'"{name}": {folder}/ may not include {target}/'
        return None
    if any(re.match(pattern, name) for _, pattern, _ in INCLUDE_FENCES):
        return None  # a fence's matter
    return f'"{name}" is neither "varlane/..." nor "<folder>/..."'


def check_file(path, text):
    """Returns [(line, complaint)] of one file; `path` is relative."""
    folder = path.split("/")[0]
    found = []
    code = without_comments(text)
    for match in INCLUDE.finditer(code):
        line = code.count("\n", 0, match.start(1)) + 1
        quote, name = match.group(1), match.group(2)
        if quote == "<" and name.startswith("varlane/"):
            if folder != "docs":
                found.append((line, f"<{name}> is ours: use quotes"))
            quote = '"'
        if quote == '"' and not (folder == "tests" and "/" not in name):
            complaint = check_quoted(path, folder, name)
            if complaint:
                found.append((line, complaint))
        for what, pattern, places in INCLUDE_FENCES:
            if re.match(pattern, name) and not stands_in(path, places):
                found.append((line, f"{name}: {what} may be included only in "
                                    + ", ".join(places)))
    code = COMMENT_OR_STRING.sub(blank_out, text)
    for what, pattern, places in CODE_FENCES:
        for match in re.finditer(pattern, code):
            if not stands_in(path, places):
                found.append((code.count("\n", 0, match.start()) + 1,
                              f"{what} may be used only in "
                              + ", ".join(places)))
    return found


def check_list(root):
    """Complains about sources that the build's list lacks."""
    lists = root / "CMakeLists.txt"
    if not lists.exists():
        return []  # a fixture
    named = set(re.findall(r"^\s*([a-z0-9_/]+\.cc)\b",
                           lists.read_text(encoding="utf-8"), re.M))
    there = {file.relative_to(root).as_posix()
             for folder in LIBRARY for file in (root / folder).glob("*.cc")}
    return [f"CMakeLists.txt: {path} is not listed"
            for path in sorted(there - named)]


def check_tree(root):
    """Returns (number of files read, complaints)."""
    complaints = check_list(root)
    num_files = 0
    for folder in ALLOWED_FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if not re.search(r"\.(h|cc|h\.in)$", file.name):
                continue
            num_files += 1
            path = file.relative_to(root).as_posix()
            text = file.read_text(encoding="utf-8", errors="replace")
            complaints += [f"{path}:{line}: {complaint}"
                           for line, complaint in check_file(path, text)]
    return num_files, complaints


# (file, its text, part of the complaint; None = must pass)
FIXTURES = [
    ("base/a.cc", '#include "runtime/x.h"', "base/ may not include runtime/"),
    ("base/b.h", '#include "varlane/runtime.h"', "is layer 1"),
    ("base/c.cc", '#include "varlane/status.h"\n#include "base/b.h"', None),
    ("runtime/a.cc", '#include "kernels/x.h"', "may not include kernels/"),
    ("runtime/b.cc", "#include <hwloc.h>\n#include <tbb/task.h>", None),
    ("kernels/a.cc", '#include "runtime/x.h"', "may not include runtime/"),
    ("kernels/b.cc", '#include "varlane/runtime.h"', "is layer 1"),
    ("kernels/c.cc", '#include "hwy/highway.h"', None),
    ("kernels/d.cc", "#include <mutex>", "threads and locks"),
    ("memory/a.cc", '#include "hwy/highway.h"', "Highway may be included"),
    ("memory/b.cc", "#include <tbb/tbb.h>", "oneTBB may be included"),
    ("memory/c.cc", "#include <oneapi/tbb/x.h>", "oneTBB may be included"),
    ("memory/d.cc", "#include <hwloc.h>", "hwloc may be included"),
    ("memory/e.cc", '#include "varlane/attention.h"', "is layer 3"),
    ("memory/f.cc", '#include "kernels/x.h"', "may not include kernels/"),
    ("memory/g.cc", '#include <mutex>\n#include "runtime/x.h"', None),
    ("attention/a.cc", '#include "serving/x.h"', "may not include serving/"),
    ("attention/b.cc", "#include <thread>", "threads and locks"),
    ("serving/a.cc", '#include "kernels/x.h"', "may not include kernels/"),
    ("tools/a.cc", '#include "memory/x.h"', "may not include memory/"),
    ("tools/b.cc", '#include "varlane/scheduler.h"\n#include <fmt/core.h>',
     None),
    ("include/varlane/runtime.h", '#include "varlane/kv_pool.h"', "is layer 2"),
    ("include/varlane/dtype.h", '#include "base/math.h"',
     "may not include base/"),
    ("include/varlane/status.h", "#include <fmt/core.h>", "fmt may be"),
    ("include/varlane/attention.h", '#include "varlane/nowhere.h"',
     "has no layer"),
    ("serving/b.cc", '#include "local.h"', 'neither "varlane/..."'),
    ("memory/h.cc", 'auto* x = std::getenv("X");', "getenv may be used"),
    ("memory/i.cc", "// getenv( is for base/env.cc\n"
     '/* #include "kernels/x.h" */\nauto* x = "getenv(";', None),
    ("base/env.cc", 'auto* x = std::getenv("X");', None),
]


def self_test():
    """Every fixture alone in a tree: complained about, or not, as said."""
    failures = 0
    for path, text, expected in FIXTURES:
        with tempfile.TemporaryDirectory() as name:
            file = pathlib.Path(name) / path
            file.parent.mkdir(parents=True)
            file.write_text(text + "\n", encoding="utf-8")
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
    parser.add_argument("--root", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parent.parent)
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    if options.self_test:
        return self_test()
    num_files, complaints = check_tree(options.root)
    for complaint in complaints:
        print(complaint)
    print(f"{num_files} files, {len(complaints)} violations")
    return 1 if complaints or num_files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
