"""Names the text files of the tree, for the rules that read them all.

SPDX-License-Identifier: Apache-2.0
"""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("include", "base", "runtime", "kernels", "memory", "attention",
           "serving", "tools", "bench", "tests", "docs", "cmake", ".ci")
CPP = (".h", ".cc", ".h.in")
CODE = CPP + (".py", ".cmake", ".sh", "CMakeLists.txt")
TEXT = CODE + (".md", ".in", ".json", ".supp", "LICENSE", "/run",
               ".clang-format", ".clang-tidy", ".editorconfig", ".gitignore")


def files(endings, root=ROOT):
    """Relative paths of the files with one of these endings, sorted."""
    found = [file for file in root.iterdir() if file.is_file()]
    for folder in FOLDERS:
        found += [file for file in (root / folder).rglob("*")
                  if file.is_file() and "__pycache__" not in file.parts]
    paths = sorted(file.relative_to(root).as_posix() for file in found)
    return [path for path in paths if path.endswith(endings)]
