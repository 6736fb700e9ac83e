"""`launch/kubernetes.yaml` is valid for Kubernetes' client models and consistent."""

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
def test_manifest_is_valid_for_the_kubernetes_client(manifest, kind):
    api = client.ApiClient()
    # The client drops unknown or misplaced keys and raises on missing required ones.
    read = api.deserialize(json.dumps(manifest[kind]), MODELS[kind], "application/json")
    assert api.sanitize_for_serialization(read) == manifest[kind]


def test_parts_refer_to_the_same_pods(manifest):
    job = manifest["Job"]
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert pod["subdomain"] == manifest["Service"]["metadata"]["name"]
    assert manifest["Service"]["spec"]["selector"] == {"job-name": name}
    rule = manifest["NetworkPolicy"]["spec"]
    assert rule["podSelector"]["matchLabels"] == {"job-name": name}
    assert rule["ingress"][0]["from"][0]["podSelector"] == rule["podSelector"]
    environment = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert environment["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"


def test_environment_matches_torchrun_script(manifest):
    job = manifest["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    read = set(re.findall(r"\$\{([A-Z_]+)", (LAUNCH / "torchrun.sh").read_text()))
    assert set(environment) - {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= read
    assert job["completions"] == job["parallelism"] == int(environment["NUM_NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == environment["PROCESSES"]
    assert container["command"] == ["bash", "launch/torchrun.sh"]
    assert (LAUNCH.parent / container["args"][0]).exists()


def test_failure_policy_uses_megavis_exit_codes(manifest):
    rules = manifest["Job"]["spec"]["podFailurePolicy"]["rules"]
    codes = {
        code: rule["action"]
        for rule in rules
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert codes == {2: "FailJob", 72: "FailJob", 75: "Ignore"}
    assert HUNG_EXIT_CODE not in codes
