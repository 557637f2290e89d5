"""The Dockerfiles: linted, and held against the tree and the chart that they belong to. No image is built here."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))
HADOLINT = Path(sysconfig.get_path("scripts")) / "hadolint"


@pytest.fixture(params=IMAGES, ids=lambda path: path.name)
def image(request) -> Path:
    return request.param


def instructions(image: Path) -> list[tuple[str, str]]:
    """(RUN, what follows), with continued lines joined and comments left out."""
    text = re.sub(r"^\s*#.*\n", "", image.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def last_stage(image: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, rest in instructions(image):
        if name == "FROM":
            found = {}
        found.setdefault(name, []).append(rest)
    return found


def lint(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "--failure-threshold=style", "-"], input=text, capture_output=True, text=True)


def test_there_is_one_for_cpus_and_one_for_gpus():
    assert [image.stem for image in IMAGES] == ["cpu", "cuda"]


def test_images_pass_hadolint(image):
    run = lint(image.read_text())
    assert run.returncode == 0, run.stdout
    assert "DL3002" in lint(image.read_text() + "USER root\n").stdout, "a last user who is root would be found"


def test_images_run_the_server_as_nobody(image):
    stage = last_stage(image)
    assert re.fullmatch(r"([1-9]\d+):([1-9]\d+)", stage["USER"][-1])
    assert stage["ENTRYPOINT"] == ['["/usr/local/bin/shardmlp-server"]']
    chart = (ROOT / "deploy/helm/shardmlp/templates/statefulset.yaml").read_text()
    assert f"runAsUser: {stage['USER'][-1].split(':')[0]}\n" in chart
    assert set(stage["EXPOSE"][0].split()) == set(re.findall(r"containerPort: (\d+)", chart))


def test_tag_in_the_comment_is_what_the_chart_pulls(image):
    version = yaml.safe_load((ROOT / "deploy/helm/shardmlp/Chart.yaml").read_text())["appVersion"]
    suffix = {"cpu": "", "cuda": "-cuda"}[image.stem]
    assert f"--file deploy/docker/{image.name} --tag shardmlp-server:{version}{suffix} .\n" in image.read_text()
    assert f"project(shardmlp VERSION {version} " in (ROOT / "CMakeLists.txt").read_text()


def test_every_argument_of_the_build_is_explained(image):
    comment = image.read_text().partition("\nFROM")[0]
    arguments = {rest.partition("=")[0] for name, rest in instructions(image) if name == "ARG"}
    assert arguments
    for argument in arguments:
        assert f"--build-arg {argument}=" in comment


def test_options_of_the_build_are_the_projects(image):
    options = re.findall(r"-D(SHARDMLP_\w+)=", image.read_text())
    assert options
    for option in options:
        assert f"option({option} " in (ROOT / "CMakeLists.txt").read_text()


def test_context_has_what_the_build_reads_and_nothing_else(image):
    kept = Path(f"{image}.dockerignore").read_text().split("\n*\n")[1].split()
    read = set(re.findall(r"^(?:add_subdirectory|include)\((\w+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE))
    assert {line.removeprefix("!").partition("/")[0] for line in kept} == read | {"CMakeLists.txt", "scripts"}
    assert all((ROOT / line.removeprefix("!")).exists() for line in kept)


@cache
def dependencies() -> dict[str, set[str]]:
    """Of each Debian package that is installed here, what it names as needed."""
    shown = "${Package}\t${Pre-Depends},${Depends}\n"
    listed = subprocess.run(["dpkg-query", "-W", "-f", shown], capture_output=True, text=True, check=True).stdout
    rows = (line.split("\t") for line in listed.splitlines())
    return {package: set(re.findall(r"(?:^|[,|])\s*([a-z0-9.+-]+)", needed)) for package, needed in rows}


def closure(packages: set[str]) -> set[str]:
    found, new = set(), set(packages)
    while new:
        found |= new
        new = {needed for package in new for needed in dependencies().get(package, ())} - found
    return found


def owners(libraries: set[str]) -> dict[str, str]:
    """The Debian package of each file. dpkg knows it by the package's path, which may lack the /usr that links lead to."""
    paths = [path for library in libraries for path in (library, library.removeprefix("/usr"))]
    found = subprocess.run(["dpkg-query", "-S", *paths], capture_output=True, text=True).stdout
    rows = (line.split(": ") for line in found.splitlines() if not line.startswith("diversion"))
    by_path = {path: package.partition(":")[0] for package, path in rows}
    return {library: by_path.get(library, by_path.get(library.removeprefix("/usr"), "none")) for library in libraries}


def test_every_library_that_the_server_loads_is_in_the_image(image):
    server = Path(os.environ["SHARDMLP_SERVER"])
    install = last_stage(image)["RUN"][0]
    packages = set(re.search(r"--no-install-recommends\s+(.*?)&&", install)[1].split())
    packages = {package for package in packages if not package.startswith('"')}  # NVIDIA's
    provided = closure(packages | {"libc6"})
    libraries = set()
    for program in (server, server.parents[1] / "client/cli/shardmlpctl"):
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        libraries |= {os.path.realpath(path) for path in re.findall(r"=> (/\S+)", linked)}
    libraries = {library for library in libraries if not re.search("cuda|nccl", library)}
    assert len(libraries) > 20
    for library, package in owners(libraries).items():
        assert package in provided, f"{library} is of {package}, which the image lacks"
