"""`launch/kubernetes.yaml`: Kubernetes' own models take it, and its parts fit each other."""

import json
import re
from pathlib import Path

import pytest
import yaml
from kubernetes import client

from megavis.training.faults.watchdog import HUNG_EXIT_CODE

pytestmark = pytest.mark.once

LAUNCH = Path(__file__).parents[2] / "launch"
MODELS = {"Service": "V1Service", "NetworkPolicy": "V1NetworkPolicy", "Job": "V1Job"}


@pytest.fixture(scope="module")
def manifest():
    documents = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


@pytest.mark.parametrize("kind", list(MODELS))
def test_kubernetes_models_know_every_key(manifest, kind):
    api = client.ApiClient()
    # A key that is unknown or in the wrong place is dropped, one that must be there raises.
    read = api.deserialize(json.dumps(manifest[kind]), MODELS[kind], "application/json")
    assert api.sanitize_for_serialization(read) == manifest[kind]


def test_all_name_the_same_pods(manifest):
    job = manifest["Job"]
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert pod["subdomain"] == manifest["Service"]["metadata"]["name"]
    assert manifest["Service"]["spec"]["selector"] == {"job-name": name}
    rule = manifest["NetworkPolicy"]["spec"]
    assert rule["podSelector"]["matchLabels"] == {"job-name": name}
    assert rule["ingress"][0]["from"][0]["podSelector"] == rule["podSelector"]
    environment = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert environment["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"


def test_torchrun_gets_what_it_reads(manifest):
    job = manifest["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    read = set(re.findall(r"\$\{([A-Z_]+)", (LAUNCH / "torchrun.sh").read_text()))
    assert set(environment) - {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= read
    assert job["completions"] == job["parallelism"] == int(environment["NUM_NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == environment["PROCESSES"]
    assert container["command"] == ["bash", "launch/torchrun.sh"]
    assert (LAUNCH.parent / container["args"][0]).exists()


def test_exit_codes_are_megavis_s(manifest):
    rules = manifest["Job"]["spec"]["podFailurePolicy"]["rules"]
    codes = {
        code: rule["action"]
        for rule in rules
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert codes == {2: "FailJob", 75: "Ignore"}
    assert HUNG_EXIT_CODE not in codes
