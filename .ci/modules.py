#!/usr/bin/env python3
"""Fails if the modules of a crate or of a folder import each other in a cycle.

Reads the `crate::`, `self::` and `super::` paths of all files except tests. A name that a module
re-exports counts as the module that defines it. A child may import from its parent, of which it is
a part. `--self-test` checks the checker with crates that have cycles.
"""

import re
import sys
import tempfile
from pathlib import Path

# Folders whose files are one module, because their types contain each other: a graph contains
# commands, a command can replay a graph, and a GPU owns pools of memory that refer to it.
ONE_MODULE = {
    "host/driver/src/lib.rs": {"crate::cuda", "crate::hip"},
    "host/src/lib.rs": {"crate::cpu", "crate::gpu"},
    "emulator/cuda-fake/src/lib.rs": {"crate::core"},
}

# A `use` of this crate, with its tree of names; and a path of this crate in code.
USE = re.compile(r"\buse\s+((?:crate|self|super)\b[^;]*);", re.DOTALL)
PATH = re.compile(r"(?<![\w:$])((?:crate|super)(?:::\w+)+)")
MODULE = re.compile(r"\bmod\s+(\w+)\s*;")


def code(path):
    """Returns a file's text without comments and unit tests."""
    text = re.sub(r"//[^\n]*", "", path.read_text())
    return text.split("#[cfg(test)]\nmod tests {")[0]


def is_test(name):
    return name in ("tests", "fake", "fuzz") or name.endswith("_tests")


def paths(tree):
    """Returns the paths of a `use` tree, as (path, name that it gets)."""
    tree = tree.strip()
    brace = tree.find("{")
    if brace < 0:
        path, _, alias = (part.strip() for part in tree.partition(" as "))
        parts = tuple(path.split("::"))
        return [(parts, alias or parts[-1])]
    prefix = tuple(part for part in tree[:brace].strip().split("::") if part)
    depth, item, found = 0, "", []
    for char in tree[brace + 1 : tree.rfind("}")] + ",":
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            if item.strip():
                for path, name in paths(item):
                    if path[-1] == "self":
                        found.append((prefix + path[:-1], name if name != "self" else prefix[-1]))
                    else:
                        found.append((prefix + path, name))
            item = ""
        else:
            item += char
    return found


class Crate:
    """The modules of a crate: their texts, children and imported names, by path."""

    def __init__(self, root):
        self.text = {}
        self.children = {}
        self.names = {}
        self.load((), root, root.parent)
        for module, text in self.text.items():
            uses = [path for tree in USE.findall(text) for path in paths(tree)]
            self.names[module] = {name: self.absolute(module, path) for path, name in uses}

    def load(self, module, file, folder):
        self.text[module] = code(file)
        self.children[module] = set()
        for name in MODULE.findall(self.text[module]):
            for place in (folder / f"{name}.rs", folder / name / "mod.rs"):
                if place.exists() and not is_test(name):
                    self.children[module].add(name)
                    self.load((*module, name), place, folder / name)

    def absolute(self, module, path):
        """Returns the absolute form of `path`, which occurs in a file of `module`."""
        at, rest = module, list(path)
        if rest[0] == "crate":
            at, rest = (), rest[1:]
        while rest and rest[0] in ("self", "super"):
            if rest[0] == "super":
                at = at[:-1]
            rest = rest[1:]
        return (*at, *rest)

    def home(self, path, depth=0):
        """Returns the module that defines the item at `path`."""
        module = ()
        for index, part in enumerate(path):
            if part in self.children[module]:
                module = (*module, part)
                continue
            target = self.names[module].get(part)
            is_own = target and target[: len(module) + 1] == (*module, part)
            if target and not is_own and depth < 8:
                return self.home((*target, *path[index + 1 :]), depth + 1)
            break
        return module

    def arrows(self, parent):
        """Returns the modules that each child of `parent` imports among its siblings."""
        graph = {child: set() for child in self.children[parent]}
        level = len(parent)
        for module, text in self.text.items():
            if module[:level] != parent or len(module) <= level:
                continue
            used = list(self.names[module].values())
            used += [self.absolute(module, path.split("::")) for path in PATH.findall(text)]
            for path in used:
                home = self.home(path)
                if home[:level] == parent and len(home) > level and home[level] != module[level]:
                    graph[module[level]].add(home[level])
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


def all_cycles(root):
    """Returns the cycles of the crate whose root is the file `root`, as (module, its cycles)."""
    crate = Crate(root)
    for parent in sorted(crate.children):
        for cycle in sorted(cycles(crate.arrows(parent))):
            yield "::".join(("crate", *parent)), cycle


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "inner").mkdir()

        def check(expected, **files):
            for name, text in files.items():
                (root / f"{name.replace('__', '/')}.rs").write_text(text)
            found = list(all_cycles(root / "lib.rs"))
            assert found == expected, found

        top = ("crate", ("a", "b"))
        check(
            [top],
            lib="mod a;\nmod b;\nmod c;\nmod inner;\npub use a::Thing;\npub use self::a::Thing;\n",
            a="use crate::{c, b::{X, Y}};\n",
            b="// use crate::c;\nfn f() -> crate::Thing {}\n",
            c="#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n",
            inner__mod="mod x;\nmod y;\npub use self::x::Name;\n",
            inner__x="use super::super::c;\n",
            inner__y="use super::Name;\n",
        )
        check([top], b="use super::Thing;\n")
        check([], b="")
        check([("crate::inner", ("x", "y"))], inner__x="use crate::inner::y::Other;\n")
        own = ("crate", ("c", "inner"))
        check([own], inner__x="use crate::c;\n", c="use crate::inner::Name;\n")


def main():
    self_test()
    if sys.argv[1:] == ["--self-test"]:
        return 0
    wrong = 0
    for root in sorted([*Path().glob("**/src/lib.rs"), *Path().glob("**/src/main.rs")]):
        if "target" in root.parts:
            continue
        listed = set(ONE_MODULE.get(str(root), ()))
        for parent, cycle in all_cycles(root):
            if parent in ONE_MODULE.get(str(root), ()):
                listed.discard(parent)
                continue
            print(f"{root}: modules of {parent} import each other: {', '.join(cycle)}")
            wrong += 1
        for parent in sorted(listed):
            print(f"{root}: {parent} has no cycle, remove it from ONE_MODULE")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
