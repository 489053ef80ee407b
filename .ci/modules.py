#!/usr/bin/env python3
"""Fails if the top-level modules of a crate import each other in a cycle.

Reads the `crate::` paths of all files except tests. A name that the root of the crate re-exports
counts as its module. `--self-test` checks the checker with a crate that has a cycle.
"""

import re
import sys
import tempfile
from pathlib import Path

USE = re.compile(r"\bcrate::(?:\{(.*?)\};|([A-Za-z_0-9]+))", re.DOTALL)
# A path to the root of the crate in a file of the root.
SUPER = re.compile(r"^use super::", re.MULTILINE)
REEXPORT = re.compile(r"\buse (?:self::)?([a-z_0-9]+)::(?:\{(.*?)\}|(\w+(?: as \w+)?));", re.DOTALL)


def code(path):
    """Returns a file's text without comments and unit tests."""
    text = re.sub(r"//[^\n]*", "", path.read_text())
    return text.split("#[cfg(test)]\nmod tests {")[0]


def is_test(path):
    return "tests" in path.parts or path.stem in ("tests", "fake", "fuzz") or "_tests" in path.stem


def first_names(group):
    """Returns the first segment of every path in the braces of a `use`."""
    depth, name, names = 0, "", []
    for char in group + ",":
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            names.append(re.split(r"::|\{| as ", name.strip())[0].strip())
            name = ""
        else:
            name += char
    return names


def arrows(root):
    """Returns the modules that each top-level module of the crate at `root` imports."""
    lib = code(root / "lib.rs")
    modules = set(re.findall(r"\bmod ([a-z_0-9]+);", lib))
    home = {}
    for module, group, single in REEXPORT.findall(lib):
        for name in (group or single).split(","):
            home[name.split(" as ")[-1].split("::")[-1].strip()] = module
    graph = {module: set() for module in modules}
    for path in root.rglob("*.rs"):
        relative = path.relative_to(root)
        module = relative.parts[0].removesuffix(".rs")
        if module not in modules or is_test(relative):
            continue
        text = code(path)
        if len(relative.parts) == 1:
            text = SUPER.sub("use crate::", text)
        for group, single in USE.findall(text):
            for name in first_names(group) if group else [single]:
                target = name if name in modules else home.get(name)
                if target in modules and target != module:
                    graph[module].add(target)
    return graph


def cycles(graph):
    """Returns the sets of modules that reach each other, as sorted tuples."""
    reach = {module: set(targets) for module, targets in graph.items()}
    for middle in graph:
        for module in graph:
            if middle in reach[module]:
                reach[module] |= reach[middle]
    found = set()
    for module in graph:
        group = {other for other in graph if other in reach[module] and module in reach[other]}
        if len(group) > 1:
            found.add(tuple(sorted(group)))
    return found


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "lib.rs").write_text("mod a;\nmod b;\nmod c;\npub use a::Thing;\n")
        (root / "a.rs").write_text("use crate::{c, b::{X, Y}};\n")
        (root / "b.rs").write_text("// use crate::c;\nfn f() -> crate::Thing {}\n")
        (root / "c.rs").write_text("#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n")
        assert cycles(arrows(root)) == {("a", "b")}, arrows(root)
        (root / "b.rs").write_text("use super::Thing;\n")
        assert cycles(arrows(root)) == {("a", "b")}, arrows(root)
        (root / "b.rs").write_text("")
        assert cycles(arrows(root)) == set(), arrows(root)


def main():
    self_test()
    if sys.argv[1:] == ["--self-test"]:
        return 0
    wrong = 0
    for lib in sorted(Path().glob("**/src/lib.rs")):
        root = lib.parent
        if "target" in root.parts:
            continue
        found = cycles(arrows(root))
        for cycle in sorted(found):
            print(f"{root}: modules import each other: {', '.join(cycle)}")
        wrong += len(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
