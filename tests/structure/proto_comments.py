"""Whether the protocol explains itself."""

import re

# What needs a comment: rpcs, fields of messages and values of enums.
ELEMENT = re.compile(r"rpc\s+\w+|(repeated |optional )?[\w.<>, ]+\s\w+\s*=\s*\d+|[A-Z][A-Z0-9_]*\s*=\s*\d+")


def uncommented_proto_elements(root):
    """Those without a comment right above or on their line."""
    found = []
    for path in sorted((root / "proto" / "shardmlp").rglob("*.proto")):
        commented = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code, _, comment = (part.strip() for part in line.partition("//"))
            if not code:
                commented = bool(comment)
                continue
            if ELEMENT.match(code) and not commented and not comment:
                found.append(f"{path.relative_to(root)}:{number}: no comment on {code}")
            commented = False
    return found
