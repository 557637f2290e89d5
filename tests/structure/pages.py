"""Whether what README and docs point to is there."""

import re

from tree import page_files

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# A path from the root of the tree, wherever it is written.
PATH = re.compile(r"(?<![\w/.<-])((?:scripts|docs|kernels|server|client|proto|tests|deploy|cmake|\.ci)/[\w./*-]*)")


def dead_links(root):
    found = []
    for page in page_files(root):
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for target in LINK.findall(line):
                if "://" in target or target.startswith(("#", "mailto:")):
                    continue
                if not (page.parent / target.partition("#")[0]).exists():
                    found.append(f"{page.relative_to(root)}:{number}: no {target}")
    return found


def missing_paths(root):
    found = []
    for page in page_files(root):
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for path in PATH.findall(line):
                path = path.rstrip(".")
                # "proto/wire" stands for its header and source.
                if not any(root.glob(path)) and not any(root.glob(path + ".*")):
                    found.append(f"{page.relative_to(root)}:{number}: no {path}")
    return found
