"""Adds up JUnit files: `count_tests.py FILE...` prints "N passed, N failed, N skipped"."""

import sys
import xml.etree.ElementTree as ElementTree


def count(paths):
    passed = failed = skipped = 0
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            outcomes = {child.tag for child in case}
            if outcomes & {"failure", "error"}:
                failed += 1
            elif "skipped" in outcomes:
                skipped += 1
            else:
                passed += 1
    return passed, failed, skipped


if __name__ == "__main__":
    print("{} passed, {} failed, {} skipped".format(*count(sys.argv[1:])))
