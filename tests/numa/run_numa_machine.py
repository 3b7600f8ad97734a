#!/usr/bin/env python3
"""Runs programs on a virtual machine with several NUMA nodes.

  run_numa_machine.py --layout 2-nodes --init INIT -- PROGRAM ARG... [--and ...]

Boots Debian's cloud kernel under QEMU's emulation (no KVM, no privilege) with
an initramfs of INIT, the programs and the libraries that ldd names. What they
print comes from the machine's serial console. Exit code: 0 where every program
ended with 0 and every --expect was met, 1 where one was not or the machine
never came up, 77 where QEMU or the kernel cannot be had; the reason is printed.
A machine whose kernel hangs before it runs a program is booted again.

The kernel package is downloaded with apt-get once, unpacked without being
installed, and kept in --cache. VARLANE_NUMA_KERNEL names another kernel image.
SPDX-License-Identifier: Apache-2.0
"""

import argparse
import fcntl
import glob
import os
import pathlib
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time

SKIP = 77
QEMU = "qemu-system-x86_64"
NODE_MIB = 320
# Now and then, on busy hosts, the emulated kernel locks up for good ("soft
# lockup" of a kworker) before it runs anything; else that takes some seconds.
BOOTS = 3
BOOT_SECONDS = 45
RUNS = b"numa-machine: run "  # what init says first

# name: nodes as (CPUs, has memory), and rows of distances where they are not
# QEMU's own (10 to itself, 20 to others).
LAYOUTS = {
    "2-nodes": ([(2, True), (2, True)], []),
    "4-nodes": ([(1, True)] * 4,
                [[10, 16, 22, 28], [16, 10, 28, 22], [22, 28, 10, 16],
                 [28, 22, 16, 10]]),
    # Node 1 has no memory; node 2 is the nearest that has.
    "no-memory": ([(1, True), (1, False), (2, True)],
                  [[10, 30, 20], [30, 10, 15], [20, 15, 10]]),
    # Node 2 has no CPUs. (The kernel numbers nodes with CPUs first.)
    "no-cpus": ([(2, True), (1, True), (0, True)], []),
}

# The CPU and more of -smp. QEMU's own CPU calls itself AMD's, whose L3 Linux
# takes to be the node's; Intel's is the socket's, so here each CPU has one.
# (Dies with an L3 each are seen by Linux 6.1, but not by 6.12.)
CPU = {"2-nodes": ("max,vendor=GenuineIntel", ",sockets=4,cores=1")}


def skip(reason):
    print(f"SKIPPED: {reason}", flush=True)
    sys.exit(SKIP)


def run(command, **options):
    return subprocess.run(command, check=True, text=True, capture_output=True,
                          **options).stdout


def kernel_package():
    """The package that the linux-image-cloud-amd64 of today stands for."""
    depends = run(["apt-cache", "depends", "linux-image-cloud-amd64"])
    return re.search(r"Depends: (linux-image-\S+)", depends).group(1)


def find_kernel(cache):
    """A bootable kernel image; skips where there is none to be had."""
    named = os.environ.get("VARLANE_NUMA_KERNEL")
    if named:
        if not os.access(named, os.R_OK):
            skip(f"VARLANE_NUMA_KERNEL = {named}: no such file")
        return named
    cache.mkdir(parents=True, exist_ok=True)
    # Tests run side by side: one downloads.
    with open(cache / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kernels = sorted(cache.glob("vmlinuz-*"))
        if kernels:
            return str(kernels[-1])
        if not shutil.which("apt-get"):
            skip("no kernel: this is no Debian system; VARLANE_NUMA_KERNEL can "
                 "name an image")
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            try:
                run(["apt-get", "download", kernel_package()], cwd=folder,
                    timeout=120)
                package = glob.glob(f"{folder}/*.deb")[0]
                run(["dpkg", "-x", package, f"{folder}/root"])
            except (subprocess.SubprocessError, OSError, AttributeError,
                    IndexError) as error:
                why = getattr(error, "stderr", None) or error
                skip(f"the kernel package cannot be had: {str(why).strip()}")
            image = glob.glob(f"{folder}/root/boot/vmlinuz-*")[0]
            kernel = cache / os.path.basename(image)
            os.replace(image, kernel)
            return str(kernel)


def libraries_of(program):
    """What ldd names, the loader included, by its path in the machine."""
    found = {}
    listing = run(["ldd", program])
    if "not found" in listing:
        sys.exit(f"a library of {program} is missing:\n{listing}")
    for name, path in re.findall(r"(\S+) => (/\S+)", listing):
        found["lib/" + name] = path
    for path in re.findall(r"^\s*(/\S+) \(", listing, re.MULTILINE):
        found[path.lstrip("/")] = path
    return found


def make_initramfs(folder, init, commands, environment, out):
    """Packs programs, libraries and what to run into `out`."""
    root = pathlib.Path(folder) / "root"
    files = {"init": init}
    lines = []
    for command in commands:
        name = "bin/" + os.path.basename(command[0])
        files[name] = command[0]
        lines.append(" ".join(["/" + name] + command[1:]))
    for program in list(files.values()):
        files.update(libraries_of(program))
    for name, source in files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target, follow_symlinks=True)
        if name.startswith("bin/"):
            # Symbols are most of a program's size, and unpacking takes time.
            subprocess.run(["strip", "--strip-debug", target], check=False)
    (root / "commands").write_text("\n".join(lines) + "\n", encoding="ascii")
    (root / "environment").write_text("\n".join(environment) + "\n",
                                      encoding="ascii")
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    # Not compressed: an emulated CPU takes longer to unpack it than to copy it.
    with open(out, "wb") as file:
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=root,
                       input="\n".join(names).encode(), check=True, stdout=file)


def qemu_command(layout, kernel, initramfs):
    nodes, distances = LAYOUTS[layout]
    cpu, smp = CPU.get(layout, ("max", ""))
    command = [QEMU, "-accel", "tcg,thread=multi", "-cpu", cpu, "-no-reboot",
               "-nodefaults", "-no-user-config", "-display", "none",
               "-serial", "stdio", "-kernel", kernel, "-initrd", initramfs,
               "-append", "console=ttyS0 quiet panic=-1 mitigations=off "
               "nokaslr tsc=unstable"]
    cpus = 0
    for node, (count, has_memory) in enumerate(nodes):
        numa = f"node,nodeid={node}"
        if count:
            numa += f",cpus={cpus}" + (f"-{cpus + count - 1}" if count > 1
                                       else "")
            cpus += count
        if has_memory:
            command += ["-object",
                        f"memory-backend-ram,id=m{node},size={NODE_MIB}M"]
            numa += f",memdev=m{node}"
        command += ["-numa", numa]
    for source, row in enumerate(distances):
        for target, distance in enumerate(row):
            if source != target:
                command += ["-numa", f"dist,src={source},dst={target},"
                            f"val={distance}"]
    memory = NODE_MIB * sum(has_memory for _, has_memory in nodes)
    return command + ["-smp", str(cpus) + smp, "-m", f"{memory}M"]


def boot(command, end):
    """Runs the machine until `end` and shows its console. Returns the console's
    text and whether the machine hung: it ran no program in BOOT_SECONDS."""
    machine = subprocess.Popen(command, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    boot_end = time.monotonic() + BOOT_SECONDS
    text = b""
    hung = False
    with selectors.DefaultSelector() as selector:
        selector.register(machine.stdout, selectors.EVENT_READ)
        while time.monotonic() < end and not hung:
            if selector.select(timeout=1):
                some = os.read(machine.stdout.fileno(), 65536)
                if not some:
                    break
                text += some
                sys.stdout.write(some.decode("utf-8", "replace")
                                 .replace("\r", ""))
                sys.stdout.flush()
            hung = time.monotonic() >= boot_end and RUNS not in text
        else:
            print("numa-machine: stopped:",
                  f"no program ran in {BOOT_SECONDS} s" if hung else
                  "not done in time", flush=True)
    machine.kill()  # if it has not ended: its console is all that is wanted
    machine.wait()
    return text.decode("utf-8", "replace").replace("\r", ""), hung


def boot_until_it_runs(command, timeout):
    """The console's text of the first boot that does not hang, or the last."""
    end = time.monotonic() + timeout
    for _ in range(BOOTS):
        text, hung = boot(command, end)
        if not hung:
            break
    return text


def main():
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--layout", choices=sorted(LAYOUTS), required=True)
    parser.add_argument("--init", required=True)
    parser.add_argument("--cache", type=pathlib.Path,
                        default=pathlib.Path("build/numa"))
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--expect", action="append", default=[],
                        help="regular expression that a line must match")
    parser.add_argument("--env", action="append", default=[],
                        help="NAME=VALUE for the programs")
    arguments = parser.parse_args(sys.argv[1:split])
    commands = [[]]
    for word in sys.argv[split + 1:]:
        if word == "--and":
            commands.append([])
        else:
            commands[-1].append(word)
    if not all(commands):
        parser.error("what to run stands behind --")

    for tool in (QEMU, "cpio"):
        if not shutil.which(tool):
            skip(f"{tool} is not installed")
    kernel = find_kernel(arguments.cache)
    environment = [f"VARLANE_NUMA_MACHINE={arguments.layout}"] + arguments.env
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        initramfs = os.path.join(folder, "initramfs.cpio")
        make_initramfs(folder, arguments.init, commands, environment,
                       initramfs)
        text = boot_until_it_runs(
            qemu_command(arguments.layout, kernel, initramfs),
            arguments.timeout)
    codes = [int(code) for code in
             re.findall(r"^numa-machine: exit (\d+)$", text, re.MULTILINE)]
    done = re.search(r"^numa-machine: done$", text, re.MULTILINE)
    print(f"{arguments.layout}: {len(codes)} of {len(commands)} programs ran, "
          f"exit codes {codes}, {time.monotonic() - start:.0f} s", flush=True)
    missing = [line for line in arguments.expect
               if not re.search(line, text, re.MULTILINE)]
    for line in missing:
        print(f"{arguments.layout}: no line matches: {line}", flush=True)
    return 0 if done and not missing and codes == [0] * len(commands) else 1


if __name__ == "__main__":
    sys.exit(main())
