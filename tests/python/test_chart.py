"""The Helm chart: what it renders is valid, and says to Kubernetes what the server's flags say to the server."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import tarfile

import kubernetes_validate
import pytest
import yaml
from helm import CHART, NAMESPACE, ROOT, Helm, container_of, flags_of, pod_of, the

INSECURE = "--set=insecure=true"
# The default values, with what has to be said beside them, and files of others.
VALUES = {"default": (INSECURE,), **{path.stem: ("--values", path) for path in sorted((CHART / "ci").glob("*.yaml"))}}
OPERATORS = "monitoring.coreos.com/"  # Prometheus' operator's, whose schemas Kubernetes does not have
WATCHED = [f"--set={switch}.enabled=true" for switch in ("serviceMonitor", "prometheusRule", "dashboard")]


@pytest.fixture(scope="session")
def helm(tmp_path_factory):
    return Helm(tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session", params=list(VALUES))
def values(request):
    return VALUES[request.param]


@pytest.fixture(scope="session")
def rendered(helm, values):
    return helm.render(*values)


def seconds(flag: str) -> int:
    return int(re.fullmatch(r"(\d+)s", flag)[1])


def gib(quantity: str) -> int:
    return int(re.fullmatch(r"(\d+)Gi(B?)", quantity)[1])


def secrets_of(rendered) -> dict[str, str]:
    """By volume."""
    volumes = pod_of(rendered)["volumes"]
    return {volume["name"]: volume["secret"]["secretName"] for volume in volumes if "secret" in volume}


def check(resource) -> None:
    """Against the oldest version of Kubernetes that the chart takes, and the newest that is known here."""
    oldest = re.search(r"[\d.]+", yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"])[0]
    for version in (oldest, kubernetes_validate.latest_version()):
        kubernetes_validate.validate(resource, version, strict=True)


def test_chart_passes_helms_lint(helm, values):
    run = helm.run("lint", "--strict", CHART, *values)
    assert run.returncode == 0, run.stdout + run.stderr


def test_resources_fit_kubernetes_schemas(rendered):
    for resource in rendered.values():
        assert resource["metadata"]["labels"]["app.kubernetes.io/name"] == "shardmlp"
        if not resource["apiVersion"].startswith(OPERATORS):
            check(resource)


def test_a_misspelt_field_would_be_found(helm):
    wrong = copy.deepcopy(the(helm.render(INSECURE), "StatefulSet"))
    wrong["spec"]["template"]["spec"]["terminationGraceSeconds"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGraceSeconds"):
        check(wrong)


def test_server_takes_every_flag(rendered):
    """It reads all of them before it finds that the model is missing, which is said last."""
    arguments = [*container_of(rendered)["args"], "--rank=0", "--model="]
    run = subprocess.run([os.environ["SHARDMLP_SERVER"], *arguments], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.startswith("shardmlp-server: --model is missing"), run.stderr
    help_text = subprocess.run([os.environ["SHARDMLP_SERVER"], "--help"], capture_output=True, text=True).stdout
    for flag in flags_of(rendered):
        assert re.search(rf"^ *{flag}\b", help_text, re.MULTILINE), flag


def test_a_pods_name_is_its_rank_and_another_hosts_is_none(helm):
    flags = flags_of(helm.render(INSECURE, "--set=replicas=3"))
    asked = [f"{flag}={flags[flag]}" for flag in ("--replicas", "--rank", "--coordinator")]

    def started_on(host: str, *flags: str) -> str:
        server = f"hostname {host} && exec {os.environ['SHARDMLP_SERVER']} --insecure-listen-anywhere --model= \"$@\""
        command = ["unshare", "--uts", "sh", "-c", server, "sh", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stderr

    model_is_missing = "shardmlp-server: --model is missing"
    assert started_on("shardmlp-2", *asked).startswith(model_is_missing), "it has a rank"
    assert "--rank=3 is none of --replicas=3" in started_on("shardmlp-3", *asked)
    assert '"ip-10-0-3-x", expected one that ends in a rank' in started_on("ip-10-0-3-x", *asked)
    assert "--replicas=3 needs --rank" in started_on("ip-10-0-3-1", asked[0], asked[2])


def test_pods_are_replicas_whose_rank_is_their_ordinal(rendered):
    pods, flags = the(rendered, "StatefulSet"), flags_of(rendered)
    count = pods["spec"]["replicas"]
    assert pods["spec"]["podManagementPolicy"] == "Parallel"
    if count == 1 or "--frozen" in flags:
        assert not flags.keys() & {"--replicas", "--rank", "--coordinator"}
        return
    assert int(flags["--replicas"]) == count
    assert flags["--rank"] == "pod"
    peers = rendered["Service", pods["spec"]["serviceName"]]
    host, _, port = flags["--coordinator"].rpartition(":")
    assert host == f"{pods['metadata']['name']}-0.{peers['metadata']['name']}.{NAMESPACE}.svc.cluster.local"
    assert int(port) in [p["containerPort"] for p in container_of(rendered)["ports"] if p["name"] == "coordinator"]
    assert seconds(flags["--replica-start-timeout"]) > 0


def test_services_reach_the_pods(rendered):
    pods = the(rendered, "StatefulSet")
    labels = pods["spec"]["template"]["metadata"]["labels"]
    names = {port["name"] for port in container_of(rendered)["ports"]}
    services = [resource for (kind, _), resource in rendered.items() if kind == "Service"]
    for service in services:
        assert service["spec"]["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    assert pods["spec"]["selector"]["matchLabels"].items() <= labels.items()
    peers = rendered["Service", pods["spec"]["serviceName"]]["spec"]
    assert peers["clusterIP"] == "None" and peers["publishNotReadyAddresses"] is True
    assert not any(service["spec"].get("publishNotReadyAddresses") for service in services if service["spec"] != peers)


def test_ports_are_those_of_the_flags(rendered):
    container, flags = container_of(rendered), flags_of(rendered)
    port_of = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert flags["--listen"] == f"0.0.0.0:{port_of['grpc']}"
    assert flags["--metrics-address"] == f"0.0.0.0:{port_of['metrics']}"
    probed = port_of["health"] if "--tls-cert" in flags else port_of["grpc"]
    assert flags.get("--health-listen", flags["--listen"]) == f"0.0.0.0:{probed}", "probes know no TLS"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == probed


def test_network_policy_lets_in_what_is_named(helm):
    rendered = helm.render(*VALUES["replicas"])
    policy, labels = the(rendered, "NetworkPolicy")["spec"], the(rendered, "StatefulSet")["spec"]["selector"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["podSelector"] == labels
    replicas, trainers, prometheus = policy["ingress"]
    assert replicas == {"from": [{"podSelector": labels}]}
    assert trainers == {"from": [{"podSelector": {"matchLabels": {"role": "trainer"}}}], "ports": [{"port": "grpc"}]}
    assert [port["port"] for port in prometheus["ports"]] == ["metrics"]
    assert policy["egress"][0] == {"to": [{"podSelector": labels}]}
    closed = the(helm.render(INSECURE, "--set-json=networkPolicy.trainers=[]"), "NetworkPolicy")["spec"]
    assert ["grpc"] not in [[port["port"] for port in rule.get("ports", [])] for rule in closed["ingress"]]


def test_grace_period_has_room_for_the_drain(rendered, values):
    container, flags = container_of(rendered), flags_of(rendered)
    given = yaml.safe_load((CHART / "values.yaml").read_text())["seconds"]
    if "--values" in values:
        given |= yaml.safe_load(values[1].read_text()).get("seconds", {})
    writes = given["drainCheckpoint"] if "--drain-checkpoint" in flags else 0
    stop = container["lifecycle"]["preStop"]["sleep"]["seconds"] + seconds(flags["--drain-timeout"]) + writes
    assert pod_of(rendered)["terminationGracePeriodSeconds"] == stop + given["exit"]
    assert given["exit"] > 2 + 1, "what the server gives clients to hear the end, and then to go"


def test_probes_wait_for_the_start(rendered):
    probe, flags = container_of(rendered)["startupProbe"], flags_of(rendered)
    patience = probe["periodSeconds"] * probe["failureThreshold"]
    assert patience > seconds(flags.get("--replica-start-timeout", "0s")) + 300


def test_memory_limit_has_room_for_the_plan(rendered):
    resources, flags = container_of(rendered)["resources"], flags_of(rendered)
    assert resources["requests"] == resources["limits"]
    limit, plan = gib(resources["limits"]["memory"]), gib(flags["--memory-bytes"])
    if flags["--device"] == "cuda":
        assert resources["limits"]["nvidia.com/gpu"] == 1
        assert limit >= 4
    else:
        assert not [name for name in resources["limits"] if "gpu" in name]
        assert limit >= plan + 2, "1 GiB of messages at least, and the process"
    assert gib(flags.get("--stash-bytes", "0GiB")) < plan
    assert flags["--threads"] == resources["limits"]["cpu"]


def test_checkpoints_are_on_a_volume_of_the_pods_own(rendered):
    pods, flags = the(rendered, "StatefulSet")["spec"], flags_of(rendered)
    mounts = {mount["name"]: mount for mount in container_of(rendered)["volumeMounts"]}
    claims = {claim["metadata"]["name"]: claim for claim in pods.get("volumeClaimTemplates", [])}
    assert set(mounts) == {"model"} | set(claims) | secrets_of(rendered).keys()
    assert flags["--model"] == mounts["model"]["mountPath"] and mounts["model"]["readOnly"] is True
    if "--frozen" in flags:
        assert not claims and not {"--checkpoint-dir", "--restore", "--drain-checkpoint"} & set(flags)
        return
    assert flags["--checkpoint-dir"] == mounts["checkpoints"]["mountPath"]
    assert flags["--restore"] == "latest" and flags["--drain-checkpoint"]
    assert pods["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}


def test_secrets_are_files_that_the_flags_name(helm):
    rendered = helm.render(*VALUES["tls"])
    flags = flags_of(rendered)
    mounts = {mount["mountPath"]: mount for mount in container_of(rendered)["volumeMounts"]}
    named = {}
    for flag in ("--tls-cert", "--tls-key", "--tls-client-ca", "--replica-ca", "--token-file"):
        folder, _, file = flags[flag].rpartition("/")
        assert mounts[folder]["readOnly"] is True
        assert "subPath" not in mounts[folder], "which would never be renewed"
        named[secrets_of(rendered)[mounts[folder]["name"]], file] = flag
    assert named == {
        ("shardmlp-tls", "tls.crt"): "--tls-cert",
        ("shardmlp-tls", "tls.key"): "--tls-key",
        ("trainers-ca", "ca.crt"): "--tls-client-ca",
        ("replicas-ca", "ca.crt"): "--replica-ca",
        ("shardmlp-tokens", "token"): "--token-file",
    }
    assert "--insecure-listen-anywhere" not in flags
    for less in ("tls.replicaCaSecretName=", "tls.clientCaSecretName=,tokenSecretName="):
        flags = flags_of(helm.render(*VALUES["tls"], INSECURE, f"--set={less}"))
        assert "--insecure-listen-anywhere" in flags, "the server would refuse to listen"
    assert "--replica-ca" not in flags_of(helm.render(*VALUES["tls"], "--set=replicas=1"))
    assert "--insecure-listen-anywhere" not in flags_of(helm.render(*VALUES["tls"], INSECURE)), "nothing is open"


def test_pod_may_do_nothing_that_it_need_not(rendered):
    pod, own = pod_of(rendered), container_of(rendered)["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_disruptions_and_nodes_are_for_these_pods(rendered):
    selector = the(rendered, "StatefulSet")["spec"]["selector"]
    budget = the(rendered, "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1 and budget["selector"] == selector
    spread = pod_of(rendered)["topologySpreadConstraints"]
    assert [rule["topologyKey"] for rule in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    assert all(rule["labelSelector"] == selector and rule["maxSkew"] == 1 for rule in spread)


def waiting(rules, **times: str):
    """The alerts that are named, less Shardmlp, wait that long."""
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule |= {"for": time for name, time in times.items() if rule.get("alert") == f"Shardmlp{name}"}
    return rules


def test_alerts_wait_as_long_as_they_are_told_to(helm):
    rules = yaml.safe_load((ROOT / "deploy/prometheus/shardmlp.rules.yaml").read_text())
    shown = the(helm.render(*VALUES["replicas"], "--set=seconds.load=3600"), "PrometheusRule")["spec"]
    assert shown == waiting(rules, StepStalled="1h", ReplicaMissing=f"{3600 + 600}s")
    times = "--set=prometheusRule.for.ShardmlpReplicaMissing=5m,prometheusRule.for.ShardmlpDown=15m"
    shown = the(helm.render(*VALUES["replicas"], times), "PrometheusRule")["spec"]
    assert shown == waiting(rules, ReplicaMissing="5m", Down="15m")


def test_monitoring_is_what_deploy_has_and_behind_switches(helm, tmp_path):
    rules, dashboard = ROOT / "deploy/prometheus/shardmlp.rules.yaml", ROOT / "deploy/grafana/shardmlp.json"
    assert not {"ServiceMonitor", "PrometheusRule", "ConfigMap"} & {kind for kind, _ in helm.render(INSECURE)}
    rendered = helm.render(INSECURE, *WATCHED)
    assert the(rendered, "PrometheusRule")["spec"] == waiting(yaml.safe_load(rules.read_text()), ReplicaMissing="1200s")
    shown = the(rendered, "ConfigMap")
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {name: json.loads(text) for name, text in shown["data"].items()} == {
        dashboard.name: json.loads(dashboard.read_text())
    }
    monitor = the(rendered, "ServiceMonitor")["spec"]
    watched = [
        resource
        for (kind, _), resource in rendered.items()
        if kind == "Service" and monitor["selector"]["matchLabels"].items() <= resource["metadata"]["labels"].items()
    ]
    assert len(watched) == 1, "each pod is scraped once"
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in [port["name"] for port in watched[0]["spec"]["ports"]]
    names_pods = {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "instance"}
    assert names_pods in endpoint["relabelings"], "the dashboard tells replicas apart by instance"

    # The chart has links; a package has what they lead to.
    run = helm.run("package", CHART, "--destination", tmp_path)
    assert run.returncode == 0, run.stderr
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as files:
        for source in (rules, dashboard):
            assert (CHART / "files" / source.name).resolve() == source
            assert files.extractfile(f"shardmlp/files/{source.name}").read() == source.read_bytes()
