"""Every overlay, built by kubectl and validated strictly, as it stands and as it is rendered."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from kubernetes_validate import SchemaNotFoundError, ValidationError, validate
from ray.serve.schema import ServeDeploySchema

from cluster.__main__ import DEFAULTS, app
from cluster.render import BASES, alerts, application, dump, render, storage
from cluster.schema import Schemas
from cluster.serve import Application, ServeConfig
from cluster.settings import Cluster
from cluster.shape import DEMO
from dashboards.export import DASHBOARDS
from deployments.settings import Settings

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "cluster"
KUBERNETES = "1.34"
Resource = dict[str, Any]

needs_kubectl = pytest.mark.skipif(
    not shutil.which("kubectl"), reason="kubectl, which builds overlays, is absent"
)


@pytest.fixture(scope="module")
def schemas(pytestconfig: pytest.Config) -> Schemas:
    """Of custom resources: `--schemas`, `STEPAHEAD_SCHEMAS`, else shared/schemas beside the repository."""
    named = pytestconfig.getoption("--schemas") or os.environ.get("STEPAHEAD_SCHEMAS")
    folder = Path(named or ROOT.parent / "shared" / "schemas")
    if not folder.is_dir():
        pytest.skip(f"no schemas of custom resources: {folder} is absent (--schemas DIR names another)")
    return Schemas(folder)


@functools.cache
def built(folder: Path) -> list[Resource]:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def the(kind: str, resources: list[Resource]) -> Resource:
    [found] = [resource for resource in resources if resource["kind"] == kind]
    return found


def errors(resource: Resource, schemas: Schemas) -> list[str]:
    if resource in schemas:
        return schemas.errors(resource)
    try:
        validate(resource, KUBERNETES, strict=True)
    except (ValidationError, SchemaNotFoundError) as error:
        return [str(error)]
    return []


overlays = pytest.mark.parametrize("cluster", DEFAULTS, ids=lambda cluster: f"overlay {cluster.overlay}")


@needs_kubectl
@overlays
def test_an_overlay_is_valid(cluster: Cluster, schemas: Schemas) -> None:
    resources = built(CLUSTER / "overlays" / cluster.overlay)
    assert {r["kind"]: found for r in resources if (found := errors(r, schemas))} == {}
    assert all(r["metadata"].get("namespace", "stepahead") == "stepahead" for r in resources)
    kinds = {"Namespace", "RayService", "NetworkPolicy", "PersistentVolumeClaim"}
    kinds |= {"PodMonitor", "PrometheusRule"} if cluster.on_gpus else set()
    kinds |= {"StatefulSet", "PodDisruptionBudget", "Service"} if cluster.overlay == "gpu-ha" else set()
    assert kinds <= {r["kind"] for r in resources}


@needs_kubectl
@overlays
def test_a_rendered_overlay_is_valid(cluster: Cluster, schemas: Schemas, tmp_path: Path) -> None:
    low = cluster.replicas[0]
    top = 8 if cluster.on_gpus else low
    other = Cluster(
        overlay=cluster.overlay,
        model="org/model",
        replicas=(low, top),
        routers=2,
        image="registry.example/team/stepahead",
        api_keys=True,
        engine={"max_running_requests": 64},
    )
    board = tmp_path / "serve_grafana_dashboard.json"  # as Ray names them
    board.write_text('{"title": "Serve"}')
    render(other, DEMO, tmp_path / "out", [board])
    resources = built(tmp_path / "out")
    assert {r["kind"]: found for r in resources if (found := errors(r, schemas))} == {}

    service = the("RayService", resources)
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (groups[0]["minReplicas"], groups[0]["maxReplicas"]) == (low, top)
    text = dump(service)
    assert "stepahead:" not in text.replace("registry.example/team/stepahead:", "")
    assert "value: demo" not in text
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert Settings.model_validate(args) == other.args
    maps = {r["metadata"]["name"]: r for r in resources if r["kind"] == "ConfigMap"}
    assert {each["metadata"]["labels"]["grafana_dashboard"] for each in maps.values()} == {"1"}
    assert maps["dashboard-serve-grafana-dashboard"]["data"] == {board.name: board.read_text()}
    for name, make in DASHBOARDS.items():
        assert json.loads(maps[f"dashboard-stepahead-{name}"]["data"][f"stepahead-{name}.json"]) == make()

    render(Cluster(overlay=cluster.overlay, replicas=cluster.replicas, routers=2), DEMO, tmp_path / "out")
    assert not (tmp_path / "out" / "dashboards" / board.name).exists()  # nothing of the render before


@overlays
def test_the_serve_config_is_rays_and_ours(cluster: Cluster, tmp_path: Path) -> None:
    """What Ray takes, and the same models as serve_config.yaml, so that they cannot drift."""
    patch = yaml.safe_load((CLUSTER / "overlays" / cluster.overlay / "application.yaml").read_text())
    [text] = [op["value"] for op in patch if op["path"] == "/spec/serveConfigV2"]
    config = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert config.http_options.host == "0.0.0.0"
    assert ServeConfig.model_validate(yaml.safe_load(text)).applications[0].args == cluster.args

    own = ServeConfig.model_validate(yaml.safe_load((ROOT / "serve_config.yaml").read_text()))
    ServeDeploySchema.model_validate(yaml.safe_load(own.text()))
    same = {"name", "route_prefix", "import_path"}
    assert own.applications[0].model_dump(include=same) == Application().model_dump(include=same)
    assert yaml.safe_load(text)["applications"][0].keys() == own.applications[0].model_dump().keys()


def test_ray_would_refuse_a_wrong_serve_config() -> None:
    good = ServeConfig().model_dump(mode="json", exclude_none=True)
    ServeDeploySchema.model_validate(good)
    for wrong, named in (
        ({"proxy_location": "Nowhere"}, "proxy_location"),
        ({"http_options": {"port": "web"}}, "port"),
        ({"applications": [{"name": "x"}]}, "import_path"),
    ):
        with pytest.raises(ValueError, match=named):
            ServeDeploySchema.model_validate(good | wrong)
    with pytest.raises(ValueError, match="prt"):  # which Ray passes over
        ServeConfig.model_validate({"http_options": {"prt": 1}})


@overlays
def test_the_patches_in_the_repository_are_up_to_date(cluster: Cluster) -> None:
    folder = CLUSTER / "overlays" / cluster.overlay
    wanted = {"application.yaml": application(cluster, DEMO), "storage.yaml": storage(DEMO)}
    for name, patch in wanted.items():
        assert (folder / name).read_text() == dump(patch), "run: python -m cluster overlays"
    assert (CLUSTER / "overlays" / "gpu" / "alerts.yaml").read_text() == dump(alerts())


@overlays
def test_all_that_a_kustomization_names_is_there(cluster: Cluster) -> None:
    """Needs no kubectl: files exist, and patches replace what is in the base or was added before."""
    for overlay in (*BASES[cluster.overlay], cluster.overlay):
        folder = CLUSTER / "overlays" / overlay
        top = yaml.safe_load((folder / "kustomization.yaml").read_text())
        named = [*top["resources"], *(patch["path"] for patch in top["patches"] if "path" in patch)]
        assert [name for name in named if not (folder / name).exists()] == []
        assert {p.name for p in folder.iterdir()} == {Path(n).name for n in named if ".." not in n} | {
            "kustomization.yaml"
        }


CHANGES: list[tuple[str, Callable[[Any], None], str]] = [
    ("unknown field", lambda spec: spec.update(serveConfigV3="x"), "serveConfigV3"),
    (
        "unknown field deep inside",
        lambda spec: containers(spec)[0].update(imagePolicy="Always"),
        "imagePolicy",
    ),
    ("wrong type", lambda spec: spec["rayClusterConfig"].update(rayVersion=2.6), "2.6"),
    (
        "not one of the values",
        lambda spec: spec["rayClusterConfig"]["autoscalerOptions"].update(version="v3"),
        "v3",
    ),
    ("missing", lambda spec: spec["rayClusterConfig"].pop("headGroupSpec"), "headGroupSpec"),
    ("no quantity", lambda spec: containers(spec)[0]["resources"]["limits"].update(memory="4 GB"), "4 GB"),
]


def containers(spec: Any) -> Any:
    return spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]


@needs_kubectl
@pytest.mark.parametrize(("name", "change", "named"), CHANGES)
def test_a_wrong_field_is_found(
    name: str, change: Callable[[Any], None], named: str, schemas: Schemas
) -> None:
    service = copy.deepcopy(the("RayService", built(CLUSTER / "overlays" / "gpu")))
    assert schemas.errors(service) == []
    change(service["spec"])
    [error] = schemas.errors(service)
    assert named in error


@needs_kubectl
def test_a_wrong_field_of_a_built_in_kind_is_found(schemas: Schemas) -> None:
    budget = copy.deepcopy(
        next(r for r in built(CLUSTER / "overlays" / "gpu-ha") if r["kind"] == "PodDisruptionBudget")
    )
    assert errors(budget, schemas) == []
    budget["spec"]["minAvailble"] = 1
    assert "minAvailble" in errors(budget, schemas)[0]


@needs_kubectl
def test_defaults_are_applied(schemas: Schemas) -> None:
    service = copy.deepcopy(the("RayService", built(CLUSTER / "overlays" / "cpu-demo")))
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert "numOfHosts" not in group
    completed = schemas.with_defaults(service)["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert completed["numOfHosts"] == 1
    del group["groupName"], group["template"]  # required, and without a default
    assert len(schemas.errors(service)) == 2


@needs_kubectl
@overlays
def test_pods_are_as_the_restricted_standard_wants_them(cluster: Cluster) -> None:
    for name, pod in pods(cluster).items():
        security = pod["securityContext"]
        assert (security["runAsNonRoot"], security["seccompProfile"]["type"]) == (True, "RuntimeDefault"), (
            name
        )
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "hostPort"} & set(own)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all("hostPath" not in volume for volume in pod.get("volumes", []))


@needs_kubectl
@overlays
def test_what_pods_refer_to_exists_or_is_optional(cluster: Cluster) -> None:
    resources = built(CLUSTER / "overlays" / cluster.overlay)
    present = {(r["kind"], r["metadata"]["name"]) for r in resources}
    for pod in pods(cluster).values():
        for volume in pod.get("volumes", []):
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in present
            if secret := volume.get("secret"):
                assert secret["optional"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
        if account := pod.get("serviceAccountName"):
            assert ("ServiceAccount", account) in present


@needs_kubectl
@overlays
def test_every_pod_gets_what_ray_is_told_it_has(cluster: Cluster) -> None:
    """An engine needs 1 core and, on GPUs, a GPU; a Router half a core: all of Ray's demand has a place."""
    spec = the("RayService", built(CLUSTER / "overlays" / cluster.overlay))["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    engines = groups["engines"]
    container = engines["template"]["spec"]["containers"][0]
    gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
    assert gpus == (1 if cluster.on_gpus else 0)
    assert engines["rayStartParams"].get("num-gpus", "0") == str(gpus)
    # Whatever comes first, an engine finds its core on each of its pods.
    assert int(engines["rayStartParams"]["num-cpus"]) >= 1 + cluster.routers / 2
    if cluster.on_gpus:
        cores = int(groups["routers"]["rayStartParams"]["num-cpus"]) * groups["routers"]["replicas"]
        assert cores >= cluster.routers / 2
        assert container["image"].endswith(":cuda")
    head = spec["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    # KubeRay looks at the head's ports to make the Service of the API.
    assert {"name": "serve", "containerPort": 8000} in head["template"]["spec"]["containers"][0]["ports"]


@needs_kubectl
@overlays
def test_selectors_find_the_pods_that_they_are_meant_for(cluster: Cluster) -> None:
    """KubeRay sets app.kubernetes.io/name on its pods, so that label is not ours to select by."""
    resources = built(CLUSTER / "overlays" / cluster.overlay)
    spec = the("RayService", resources)["spec"]["rayClusterConfig"]
    templates = [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    templates += [r["spec"]["template"] for r in resources if r["kind"] == "StatefulSet"]
    labels = [template["metadata"]["labels"] for template in templates]
    assert not any("app.kubernetes.io/name" in each for each in labels[: 1 + len(spec["workerGroupSpecs"])])
    for resource in resources:
        inner = resource.get("spec", {})
        selector = inner.get("podSelector", inner.get("selector"))
        if selector and resource["kind"] not in ("PersistentVolumeClaim", "Service"):
            wanted = selector["matchLabels"].items()
            assert any(wanted <= each.items() for each in labels), resource["metadata"]["name"]


@needs_kubectl
@overlays
def test_who_may_come_in_finds_a_port_there(cluster: Cluster) -> None:
    """Ray asks for its token; what is scraped has that name, and is let in."""
    resources = built(CLUSTER / "overlays" / cluster.overlay)
    ray = the("RayService", resources)["spec"]["rayClusterConfig"]
    assert ray["authOptions"] == {"mode": "token"}
    pods = [group["template"] for group in (ray["headGroupSpec"], *ray["workerGroupSpecs"])]
    ports = [port for pod in pods for each in pod["spec"]["containers"] for port in each.get("ports", [])]
    numbers = {port["name"]: port["containerPort"] for port in ports}
    numbers["dashboard-agent"] = 52365  # Ray's, of every pod: no container names it
    rays = [each for each in resources if each["metadata"]["name"] == "stepahead"]  # Redis has one of its own
    ingress = the("NetworkPolicy", rays)["spec"]["ingress"]
    rules = {
        each["from"][0].get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/name"): {
            port["port"] for port in each["ports"]
        }
        for each in ingress
        if "ports" in each
    }
    scraped = {"metrics", "as-metrics", "dash-metrics"}
    assert rules == {
        None: {numbers["serve"]},
        "kuberay-operator": {numbers[name] for name in ("dashboard", "serve", "dashboard-agent")},
        "prometheus": {numbers[name] for name in scraped},
    }
    if cluster.on_gpus:
        monitor = the("PodMonitor", resources)
        assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} == scraped


def test_the_versions_are_the_tested_ones() -> None:
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    base = yaml.safe_load((CLUSTER / "base" / "rayservice.yaml").read_text())
    assert base["spec"]["rayClusterConfig"]["rayVersion"] == versions["ray"]


def test_the_guide_names_what_is_there() -> None:
    """Links lead to files, and options of `python -m cluster` exist."""
    guide = ROOT / "docs" / "operations.md"
    text = guide.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (guide.parent / link).exists()] == []
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    used = re.findall(r"python -m cluster ([\w-]+)((?:[^\n`]|\\\n)*)", text.replace("\\\n", " "))
    assert {name for name, _ in used} >= {"render", "size"}
    for name, arguments in used:
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", arguments)) <= options, name


def pods(cluster: Cluster) -> dict[str, Any]:
    resources = built(CLUSTER / "overlays" / cluster.overlay)
    spec = the("RayService", resources)["spec"]["rayClusterConfig"]
    found = {group["groupName"]: group["template"]["spec"] for group in spec["workerGroupSpecs"]}
    found["head"] = spec["headGroupSpec"]["template"]["spec"]
    for resource in resources:
        if resource["kind"] == "StatefulSet":
            pod = found[resource["metadata"]["name"]] = copy.deepcopy(resource["spec"]["template"]["spec"])
            claims = resource["spec"]["volumeClaimTemplates"]
            pod["volumes"] = [{"name": claim["metadata"]["name"]} for claim in claims]
    return found
