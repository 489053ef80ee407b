#!/usr/bin/env python3
"""Checks the licence of every dependency against the policy in deny.toml, and that
docs/dependencies.md names every dependency of a published crate.

If cargo-deny is installed, this script runs `cargo deny check`, which checks licences, bans and
sources. Otherwise it checks only the licences, which requires only cargo and Python 3.11.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path


def allowed(expression, policy):
    """Returns whether the SPDX `expression` can be met by the licences in `policy`."""
    tokens = re.findall(r"\(|\)|[^\s()/]+|/", expression)
    terms = []
    skip = False
    for token in tokens:
        if skip or token in ("(", ")"):
            if not skip:
                terms.append(token)
            skip = False
        elif token in ("AND", "OR", "/"):
            terms.append({"AND": "and", "OR": "or", "/": "or"}[token])
        elif token == "WITH":
            # Skips the exception, because it only adds permissions to the licence.
            skip = True
        else:
            terms.append(str(token in policy))
    return eval(" ".join(terms))  # noqa: S307: only True, False, and, or, parentheses


def self_test():
    """Asserts that `allowed` evaluates OR, AND and WITH as SPDX defines them."""
    policy = {"MIT", "Apache-2.0"}
    assert allowed("MIT", policy) and allowed("MIT OR GPL-3.0", policy)
    assert allowed("MIT/GPL-3.0", policy)
    assert allowed("(MIT OR GPL-3.0) AND Apache-2.0 WITH LLVM-exception", policy)
    assert not allowed("GPL-3.0", policy) and not allowed("MIT AND GPL-3.0", policy)


def undocumented(packages, text):
    """Returns the dependencies of published crates that `text` does not name."""
    own = {package["name"] for package in packages}
    published = [package for package in packages if package["publish"] != []]
    names = {
        dependency["name"]
        for package in published
        for dependency in package["dependencies"]
        if dependency["kind"] != "dev" and dependency["name"] not in own
    }
    return sorted(name for name in names if f"`{name}`" not in text)


def main():
    self_test()
    command = ["cargo", "metadata", "--format-version=1", "--no-deps"]
    packages = json.loads(subprocess.check_output(command))["packages"]
    assert undocumented(packages, ""), "no published crate has a dependency"
    missing = undocumented(packages, Path("docs/dependencies.md").read_text())
    if missing:
        print(f"docs/dependencies.md does not name: {', '.join(missing)}")
        return 1
    if shutil.which("cargo-deny"):
        return subprocess.call(["cargo", "deny", "check", "licenses", "bans", "sources"])
    policy = set(tomllib.loads(Path("deny.toml").read_text())["licenses"]["allow"])
    command = ["cargo", "metadata", "--format-version=1", "--locked"]
    metadata = json.loads(subprocess.check_output(command))
    wrong = 0
    for package in metadata["packages"]:
        if not allowed(package["license"] or "none", policy):
            print(f"{package['name']} {package['version']}: {package['license']}: not in deny.toml")
            wrong += 1
    print(f"licences: {len(metadata['packages'])} packages, {wrong} outside the policy")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
