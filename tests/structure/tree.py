"""The files of a tree, as the rules see them."""

ROOMS = ("proto", "kernels", "server", "client", "tests", "scripts", "cmake", "deploy")


def source_files(root, *suffixes):
    """Files of our own in the rooms, by suffix, in order."""
    return sorted(
        path
        for room in ROOMS
        for path in (root / room).rglob("*")
        if path.suffix in suffixes and path.is_file() and "__pycache__" not in path.parts
    )


def page_files(root):
    """README and docs."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])
