"""This tree keeps the rules."""

import shutil
import subprocess
from pathlib import Path

import pytest
from files import conditionals, long_files
from includes import wrong_includes
from pages import dead_links, missing_paths
from proto_comments import uncommented_proto_elements
from tree import source_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "rule", [wrong_includes, conditionals, long_files, uncommented_proto_elements, dead_links, missing_paths]
)
def test_the_tree_keeps_the_rule(rule):
    found = rule(ROOT)
    assert not found, "\n".join(found)


@pytest.mark.skipif(shutil.which("clang-format") is None, reason="clang-format is not installed")
def test_the_tree_is_formatted():
    files = source_files(ROOT, ".h", ".cc", ".cu")
    run = subprocess.run(["clang-format", "--dry-run", "-Werror", *files], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
