"""What a source file must not hold."""

import re

from tree import source_files

MAX_LINES = 500
CONDITIONAL = re.compile(r"\s*#\s*(if|ifdef|ifndef)\b\s*(.*)")
DEFINE = re.compile(r"\s*#\s*define\s+(\w+)\s*$")


def conditionals(root):
    """#if and its kin, other than an include guard: CMake picks files instead."""
    found = []
    for path in source_files(root, ".h", ".cc", ".cu"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            conditional = CONDITIONAL.match(line)
            if not conditional:
                continue
            define = DEFINE.match(lines[number]) if number < len(lines) else None
            if conditional[1] == "ifndef" and define and define[1] == conditional[2].strip():
                continue
            found.append(f"{path.relative_to(root)}:{number}: {line.strip()}")
    return found


def long_files(root):
    found = []
    for path in source_files(root, ".h", ".cc", ".cu", ".py", ".proto", ".sh", ".cmake"):
        count = len(path.read_text().splitlines())
        if count > MAX_LINES:
            found.append(f"{path.relative_to(root)}: {count} lines, at most {MAX_LINES} expected")
    return found
