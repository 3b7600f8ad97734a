#!/usr/bin/env python3
"""Breaks the kernels in every way of mutations.py; the tests must notice each.

Works in a copy of the tree. The tests are built once, for the one best Highway
target that a plain compiler flag names, and for AVX2 where a mutation is of
what only that does; each mutation recompiles only what reads the broken file,
for one cache type after the other, and relinks. As many mutations at once as
there are jobs, each in sources of its own. Fails when a mutation survives, does
not compile or no longer fits the sources.

    tools/mutation_check.py                 # all; one or two minutes each
    tools/mutation_check.py --only sink     # whose name contains it
    tools/mutation_check.py --work DIR      # keeps the build for the next time
    tools/mutation_check.py --check-texts   # only: does each fit the sources?

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

import mutations

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("attention", "base", "bench", "cmake", "include", "kernels",
           "memory", "runtime", "serving", "tests", "tools")
# Cheap and sharp first.
TESTS = ("attention_exact_test", "attention_mask_test",
         "attention_modifier_test", "attention_edge_test",
         "attention_reference_test", "attention_heads_test",
         "attention_plan_test", "attention_write_test",
         "attention_merge_states_test", "attention_bits_test")
# Which units must be compiled again, and which of their tests to run: first
# bf16, which packs and rounds, then f32, and f16 for what it alone has.
# What compares targets wants more of them than a mutant has.
STAGES = (("bf16", "-*/f32*:*/f16*:*.TargetsAgree/*"),
          ("f32", "-*/bf16*:*/f16*:*.TargetsAgree/*"),
          ("f16", "-*/bf16*:*/f32*:*.TargetsAgree/*"))
HOST_UNITS = ("attention/plan.cc", "attention/run.cc", "attention/owner.cc")
TEST_SECONDS = 300


def units_of(file, dtype):
    """The sources to compile again when `file` has changed."""
    first = dtype == STAGES[0][0]
    if file.endswith(".cc"):
        return [file] if first else []
    hosts = HOST_UNITS if first and file == mutations.ARGS else ()
    return [f"kernels/kv_{dtype}.cc", *hosts]


def target_flags(avx2_only):
    """One Highway target instead of five: an eighth of the build."""
    flags = "-O1 -DHWY_COMPILE_ONLY_STATIC"
    try:
        cpu = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        cpu = ""
    if re.search(r"\bavx2\b", cpu) and re.search(r"\bfma\b", cpu):
        flags += " -mavx2 -mfma -mbmi -mbmi2 -mf16c -maes -mpclmul"
    # Whole tiles take a way of their own where there are 32 registers.
    wide = ("f", "bw", "cd", "dq", "vl")
    if not avx2_only and all(
            re.search(rf"\bavx512_?{part}\b", cpu) for part in wide):
        flags += "".join(f" -mavx512{part}" for part in wide)
    return flags


def shell(command, cwd, **options):
    return subprocess.run(command, cwd=cwd, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, **options)


def copy_tree(to):
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                refresh(path, to)
    for path in ROOT.iterdir():
        if path.is_file():
            refresh(path, to)


def refresh(path, tree):
    """Copies one file, unless the copy has its text: keeps its time."""
    to = tree / path.relative_to(ROOT)
    if to.is_file() and to.read_bytes() == path.read_bytes():
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


class Tree:
    """The unbroken copy, its build, and how that compiles and links."""

    def __init__(self, work, jobs, flags):
        self.source = work / "source"
        self.build = work / "build"
        self.jobs = jobs
        copy_tree(self.source)
        self.configure_and_build(flags)
        commands = json.loads(
            (self.build / "compile_commands.json").read_text())
        self.compile = {
            pathlib.Path(entry["file"]).relative_to(self.source).as_posix():
            entry["command"] for entry in commands
            if entry["file"].startswith(str(self.source))}
        self.link = {test: self.link_command(test) for test in TESTS}

    def configure_and_build(self, flags):
        run = shell(
            ["cmake", "-S", str(self.source), "-B", str(self.build), "-G",
             "Ninja", "-DCMAKE_BUILD_TYPE=None",
             "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
             "-DCMAKE_CXX_FLAGS=" + flags,
             "-DVARLANE_BUILD_TOOLS=OFF", "-DVARLANE_BUILD_BENCH=OFF"], None)
        if run.returncode == 0:
            run = shell(["ninja", "-C", str(self.build), f"-j{self.jobs}",
                         *TESTS], None)
        if run.returncode != 0:
            sys.exit(run.stdout[-4000:] + "\nthe unbroken tree does not build")

    def link_command(self, test):
        listed = shell(["ninja", "-C", str(self.build), "-t", "commands",
                        f"tests/{test}"], None).stdout.splitlines()
        return listed[-1]


class Mutant:
    """Where one mutant at a time is made and tested: sources and objects."""

    def __init__(self, tree, work, number):
        self.tree = tree
        self.source = work / f"broken{number}"
        self.objects = work / f"objects{number}"
        copy_tree(self.source)

    def clear(self):
        shutil.rmtree(self.objects, ignore_errors=True)
        self.objects.mkdir()

    def compile(self, unit):
        """Returns (object, "") or (None, what the compiler says)."""
        output = self.objects / (unit.replace("/", "_") + ".o")
        command = re.sub(r" -o \S+", f" -o {shlex.quote(str(output))}",
                         self.tree.compile[unit], count=1)
        command = re.sub(rf"{re.escape(str(self.tree.source))}(?=[/\s])",
                         str(self.source), command)
        run = shell(command, self.tree.build, shell=True)
        return (output, "") if run.returncode == 0 else (None, run.stdout)

    def run_test(self, test, objects, only):
        """Returns what noticed the mutation, or an empty string."""
        binary = self.objects / test
        # Ahead of the archive, whose member of the same symbols stays unread.
        command = re.sub(
            rf" -o tests/{test}\b",
            " " + " ".join(map(str, objects)) + f" -o {binary}",
            self.tree.link[test], count=1)
        run = shell(command, self.tree.build, shell=True)
        if run.returncode != 0:
            return "", f"does not link:\n{run.stdout[-2000:]}"
        try:
            run = shell([str(binary), f"--gtest_filter={only}",
                         "--gtest_fail_fast"], self.tree.build,
                        timeout=TEST_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{test} (does not end)", ""
        if run.returncode == 0:
            return "", ""
        failed = re.search(r"\[  FAILED  \] (\S+?),? ", run.stdout)
        begun = re.findall(r"\[ RUN      \] (\S+)", run.stdout)
        if failed:
            return failed.group(1).rstrip(","), ""
        return (begun[-1] if begun else test) + " (crash)", ""


def attempt(mutant, file, old, new):
    """Returns (what caught it, "") or ("", why that is wrong)."""
    path = mutant.source / file
    text = path.read_text()
    if text.count(old) != 1:
        return "", f"its text occurs {text.count(old)} times in {file}"
    mutant.clear()
    path.write_text(text.replace(old, new))
    try:
        objects = []
        for dtype, only in STAGES:
            for unit in units_of(file, dtype):
                output, error = mutant.compile(unit)
                if output is None:
                    return "", f"does not compile:\n{error[-2000:]}"
                objects.append(output)
            for test in TESTS:
                caught, error = mutant.run_test(test, objects, only)
                if caught or error:
                    return caught, error
        return "", "SURVIVES"
    finally:
        path.write_text(text)


def attempt_all(work, jobs, flags, chosen):
    """Prints a row for each mutation, as it ends; returns how many failed."""
    tree = Tree(work, jobs, flags)
    mutants = [Mutant(tree, work, number) for number in range(jobs)]
    unbroken = mutants[0]
    unbroken.clear()
    for test in TESTS:
        caught, error = unbroken.run_test(test, [], "-*.TargetsAgree/*")
        if caught or error:
            sys.exit(f"the unbroken tree fails: {caught}{error}")
    free = queue.SimpleQueue()
    for mutant in mutants:
        free.put(mutant)

    def one(mutation):
        name, file, old, new = mutation
        mutant = free.get()
        start = time.monotonic()
        try:
            caught, error = attempt(mutant, file, old, new)
        finally:
            free.put(mutant)
        print(f"| {name} | {file} | {caught or error} | "
              f"{time.monotonic() - start:.0f} |", flush=True)
        return not caught

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return sum(pool.map(one, chosen))


def misfits(chosen):
    """Returns what does not fit the sources as they are; builds nothing."""
    names = [m[0] for m in mutations.MUTATIONS]
    wrong = [f"{name}: only AVX2's, but no mutation"
             for name in sorted(mutations.AVX2_ONLY.difference(names))]
    for name, file, old, new in chosen:
        path = ROOT / file
        times = path.read_text().count(old) if path.is_file() else 0
        if times != 1:
            wrong.append(f"{name}: its text occurs {times} times in {file}")
        if old == new:
            wrong.append(f"{name}: changes nothing")
        if names.count(name) != 1:
            wrong.append(f"{name}: the name is taken twice")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--work", type=pathlib.Path, help="kept if given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(),
                        help="mutations at once")
    parser.add_argument("--check-texts", action="store_true",
                        help="only check that every text occurs once")
    options = parser.parse_args()
    chosen = [m for m in mutations.MUTATIONS if options.only in m[0]]
    if not chosen:
        sys.exit(f"no mutation's name contains '{options.only}'")
    wrong = misfits(chosen)
    if wrong:
        sys.exit("\n".join(wrong))
    if options.check_texts:
        print(f"{len(chosen)} mutations fit the sources")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or pathlib.Path(temporary)).resolve()
        print("| mutation | file | caught by | s |\n|---|---|---|---|")
        bad = 0
        for name, avx2_only in (("best", False), ("avx2", True)):
            part = [m for m in chosen
                    if (m[0] in mutations.AVX2_ONLY) == avx2_only]
            if part:
                bad += attempt_all(work / name, options.jobs,
                                   target_flags(avx2_only), part)
    print(f"{len(chosen)} mutations, {len(chosen) - bad} caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
