#!/usr/bin/env python3
"""Checks style rules that rustfmt and clippy lack: line widths, words, first words of doc comments.

    .ci/style.py               checks the tracked files; prints violations; exits with 1 if any
    .ci/style.py --self-test   checks that each rule reports its violations
"""

import re
import subprocess
import sys
from pathlib import Path

CODE = {".rs", ".c", ".h", ".cc", ".cpp", ".cu", ".cuh", ".sh", ".py"}
COLUMNS = {"code": 100, "markdown": 120}
# Recorded measurements and generated files.
SKIPPED = ("benches/results/", "host/images/", "Cargo.lock")
# The rules for prose do not apply here, because these comments are rewritten with their code.
OLD_PROSE = ()

# The brackets keep a plain search for these words from matching this file.
WORDS = re.compile(
    r"meet[i]ng|verd[i]ct|(?<![a-z])g[a]ngs?(?![a-z])|(?<![a-z])s[e]ats?(?![a-z])"
    r"|sabot[a]ge|pl[a]nted|airb[o]rne",
    re.IGNORECASE,
)
CALQUES = re.compile(r"\b(anew|whoever|as there|of the user's)\b", re.IGNORECASE)
OPENING = re.compile(r"^\s*//[/!] (What|Whether|How|Where|Which|As|Of)\b")
TABLE = re.compile(r"^\s*//[/!] \|")
DOC = re.compile(r"^\s*//[/!]")


def check(path, lines):
    """Yields (line number, what is wrong) for the lines of the file at `path`."""
    suffix = Path(path).suffix
    markdown = suffix == ".md"
    code = suffix in CODE or path == ".ci/run"
    old = path.startswith(OLD_PROSE)
    if path == ".ci/style.py":
        return
    if found := WORDS.search(path):
        yield 0, f"the path has a word that was replaced: {found.group()}"
    limit = COLUMNS["markdown"] if markdown else COLUMNS["code"] if code else None
    fenced = False
    before_is_doc = False
    for number, line in enumerate(lines, 1):
        if markdown and line.lstrip().startswith("```"):
            fenced = not fenced
        # Exempts table rows and links, which cannot be broken, and fenced blocks, which may quote
        # real output.
        free = markdown and (fenced or line.startswith("|")) or "://" in line or TABLE.match(line)
        if limit and len(line) > limit and not free:
            yield number, f"{len(line)} columns, at most {limit}"
        # CONTRIBUTING.md is exempt, because it lists the words to avoid.
        prose = not old and path != "CONTRIBUTING.md"
        if found := WORDS.search(line) or prose and CALQUES.search(line):
            yield number, f"`{found.group()}`: CONTRIBUTING.md has the word to use"
        if suffix == ".rs":
            is_doc = bool(DOC.match(line))
            opens = is_doc and not before_is_doc
            if opens and not old and (found := OPENING.match(line)):
                yield number, f"a doc comment opens with `{found.group(1)}`: begin with a verb"
            before_is_doc = is_doc


def self_test():
    """Asserts that each rule reports its violations and reports none in correct files."""
    wrong = {
        "a.rs": ["/// What it is.", "x" * 101, "// a meet" "ing of ranks"],
        "a.md": ["y" * 121, "they begin anew"],
        "tests/plan" "ted/lib.rs": [""],
    }
    counts = {path: len(list(check(path, lines))) for path, lines in wrong.items()}
    assert counts == {"a.rs": 3, "a.md": 2, "tests/plan" "ted/lib.rs": 1}, counts
    right = {
        "a.rs": ["/// Returns the size.", "/// As in NCCL, zero is legal.", "x" * 100],
        "a.md": ["| " + "y" * 200 + " |", "```text", "z" * 200, "```"],
        "CONTRIBUTING.md": ["| anew | again |"],
    }
    for path, lines in right.items():
        assert not list(check(path, lines)), path


def main():
    self_test()
    if "--self-test" in sys.argv:
        return 0
    names = subprocess.check_output(["git", "ls-files", "-z"], text=True).split("\0")
    found = 0
    for name in filter(None, names):
        path = Path(name)
        if name.startswith(SKIPPED) or path.is_symlink() or not path.is_file():
            continue
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        for number, what in check(name, lines):
            print(f"{name}:{number}: {what}")
            found += 1
    if found:
        print(f"{found} violations of the style")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
