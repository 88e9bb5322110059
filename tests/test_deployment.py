"""Dockerfile and docker-compose.yml against the compose tool, the code, and this machine: what stands there
is legal, exists, and runs.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import compose_files as compose
import compose_on_host
import pytest
import yaml
from command_lines import ROOT, check_specbridge

from specbridge import serve
from specbridge.flags import flag
from specbridge.models import cache_dir

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROMETHEUS: dict[str, Any] = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
PACKAGES = ("protos", "specbridge", "kernels", "target_service", "draft_service", "gateway")
ROLES = ("target", "draft", "gateway")
# gRPC's own words, with no frame but its own, if a stop cancels a stream just as its handler ends: no error,
# and nothing that a service could catch.
GRPC_STOPPED = re.compile(
    r"Traceback \(most recent call last\):\n  File \"\S+/aio/server\.pyx\.pxi\", line \d+, in "
    r"grpc\._cython\.cygrpc\._schedule_rpc_coro\nasyncio\.exceptions\.CancelledError\n"
)


def role(name: str) -> str:
    """target-gpu is a target."""
    return name.split("-")[0]


def option(words: list[str], name: str) -> str:
    return words[words.index(flag(name)) + 1]


def scraped() -> dict[str, str]:
    """Prometheus' targets: job -> host:port."""
    jobs = PROMETHEUS["scrape_configs"]
    return {job["job_name"]: group["targets"][0] for job in jobs for group in job["static_configs"]}


@pytest.mark.parametrize("profile", compose.PROFILES)
def test_the_compose_tool_reads_what_we_read(profile: str) -> None:
    tool, environment = compose.compose_tool()
    command = [*tool, "--profile", profile, "config"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is not set" not in done.stderr and "obsolete" not in done.stderr, done.stderr
    shown = yaml.safe_load(done.stdout)["services"]
    for name, spec in compose.services(profile).items():
        assert shown[name]["image"] == spec["image"]
        if "command" in spec:
            words = shown[name]["command"]
            words = shlex.split(words) if isinstance(words, str) else [str(word) for word in words]
            assert words == compose.command(spec)[1:]


@pytest.mark.parametrize("profile", compose.PROFILES)
def test_commands_and_health_checks_exist(profile: str) -> None:
    found = compose.ours(profile)
    assert {role(name) for name in found} == set(ROLES)
    for name, spec in found.items():
        words = compose.command(spec)
        assert words[1] == role(name)
        check_specbridge(words)
        check_specbridge(compose.health(spec))
        listens = option(words, "grpc_listen" if role(name) == "gateway" else "listen")
        assert compose.health(spec)[2] == listens.replace("0.0.0.0", "127.0.0.1")


@pytest.mark.parametrize("profile", compose.PROFILES)
def test_addresses_and_ports_fit_together(profile: str) -> None:
    words = {role(name): compose.command(spec) for name, spec in compose.ours(profile).items()}
    for name in ("draft", "gateway"):
        assert option(words[name], "target_address") == option(words["target"], "listen")
        assert option(words[name], "target") == option(words["target"], "target")
    assert option(words["gateway"], "draft_address") == option(words["draft"], "listen")
    inside = {
        "gateway": {
            option(words["gateway"], "http_port"),
            option(words["gateway"], "grpc_listen").split(":")[1],
        },
        "target": {option(words["target"], "metrics_port")},
        "draft": {option(words["draft"], "metrics_port")},
        "prometheus": {"9090"},
        "grafana": {"3000"},
    }
    for name, spec in compose.services(profile).items():
        for bind, outer, port in (text.split(":") for text in spec.get("ports", ())):
            assert bind == "127.0.0.1" and outer == port and port in inside[role(name)], (
                f"{name}: {outer}:{port}"
            )
    exposed = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.M)[0].split()
    assert set(exposed) == inside["gateway"]
    grpc = serve.serve_settings().model_fields["grpc_port"].default
    http = serve.settings_class("gateway").model_fields["http_port"].default
    assert set(exposed) == {str(grpc), str(http)}
    # Prometheus asks for these names and ports, which other profiles' services have as aliases.
    for job, address in scraped().items():
        host, port = address.split(":")
        assert host == job and port in inside[job]
        for name, spec in compose.ours(profile).items():
            if role(name) == job and name != job:
                assert spec["networks"]["default"]["aliases"] == [job]
    for name in ("target", "draft"):
        assert option(words[name], "metrics_host") == "0.0.0.0"
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


@pytest.mark.parametrize("profile", compose.PROFILES)
def test_what_shared_memory_needs_is_shared(profile: str) -> None:
    """Case 43: without common IPC and PID namespaces, and the same GPUs, the channel falls back to inline."""
    found = compose.services(profile)
    holder = found["namespaces"]
    assert holder["ipc"] == "shareable" and "pid" not in holder
    for name, spec in compose.ours(profile).items():
        if role(name) in ("target", "draft"):
            assert spec["ipc"] == spec["pid"] == "service:namespaces", name
    if profile == "gpu":
        devices = [found[f"{name}-gpu"]["deploy"]["resources"] for name in ("target", "draft")]
        assert devices[0] == devices[1]
        assert devices[0]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
        assert "deploy" not in found["gateway-gpu"]


@pytest.mark.parametrize("profile", compose.PROFILES)
def test_services_start_in_order_and_are_watched(profile: str) -> None:
    found = compose.services(profile)
    for name, spec in found.items():
        assert spec["restart"] == "unless-stopped"
        assert "healthcheck" in spec or name == "namespaces"
        assert set(spec.get("depends_on", ())) <= set(found)
        assert not {k for k in spec.get("depends_on", ()) if "healthcheck" not in found[k]}
        if role(name) in ("draft", "gateway"):
            target = next(other for other in found if role(other) == "target")
            assert spec["depends_on"][target]["condition"] == "service_healthy"
    grace = {int(spec["stop_grace_period"].rstrip("s")) for spec in compose.ours(profile).values()}
    drains = [serve.settings_class(name).model_fields["drain"].default for name in ROLES]
    assert min(grace) > max(drains), "a service would be killed while it drains"


def test_images_are_pinned_and_built_from_the_dockerfile() -> None:
    variants = set(re.findall(r"^FROM base AS torch-(\w+)$", DOCKERFILE, re.M))
    for name, spec in compose.read()["services"].items():
        image, _, tag = spec["image"].rpartition(":")
        assert image and tag and tag != "latest", name
        if image == "specbridge":
            assert spec["build"]["args"]["VARIANT"] == tag and tag in variants, name
        else:
            assert "build" not in spec and re.search(r"\d+\.\d+", tag), name
    [base] = re.findall(r"^ARG PYTHON=(.*)$", DOCKERFILE, re.M)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)


def test_mounts_exist() -> None:
    """Files of the repository, declared volumes; in our containers only folders that the image's user has."""
    declared = set(compose.read()["volumes"])
    used = set()
    for name, spec in compose.read()["services"].items():
        for text in spec.get("volumes", ()):
            source, place, *mode = text.split(":")
            if source.startswith("./"):
                assert (ROOT / source).exists() and mode == ["ro"], f"{name}: {text}"
            else:
                used.add(source)
            if spec["image"].startswith("specbridge:"):
                assert re.search(
                    rf"install -d -o specbridge -g specbridge .*{re.escape(place)}\b", DOCKERFILE
                ), text
    assert used == declared
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/specbridge.yml").read_text())
    path = provider["providers"][0]["options"]["path"]
    grafana = compose.read()["services"]["grafana"]
    assert f"./deploy/grafana/dashboards:{path}:ro" in grafana["volumes"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (ROOT / "deploy/grafana/dashboards" / home.relative_to(path)).is_file()
    for pattern in PROMETHEUS["rule_files"]:
        assert list((ROOT / "deploy/prometheus").glob(pattern))
        mounted = f"./deploy/prometheus/{Path(pattern).parent}:/etc/prometheus/{Path(pattern).parent}:ro"
        assert mounted in compose.read()["services"]["prometheus"]["volumes"]


# ---- the Dockerfile -------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """(keyword, rest) of each, continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def test_the_image_copies_what_it_needs_and_the_context_has_it() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignore if line.startswith("!")}
    copied = {word for key, rest in instructions() if key == "COPY" for word in rest.split()[:-1]}
    assert set(PACKAGES) <= copied and copied == kept
    assert all((ROOT / name).exists() for name in copied)
    assert any(fnmatch.fnmatch(".git", line) for line in ignore if not line.startswith(("!", "#")))


def test_the_image_runs_as_nobody_special_and_knows_its_health() -> None:
    found = instructions()
    last = max(i for i, (key, _) in enumerate(found) if key == "FROM")
    final = dict(found[last:])
    assert final["USER"] == "specbridge" and "--uid 1000" in DOCKERFILE
    entry, command = json.loads(final["ENTRYPOINT"]), json.loads(final["CMD"])
    check_specbridge([*entry, *command])
    check = json.loads(final["HEALTHCHECK"].split("CMD", 1)[1])
    check_specbridge(check)
    assert check[2].endswith(f":{serve.serve_settings().model_fields['grpc_port'].default}")
    [variant] = [rest for key, rest in found if key == "ARG" and rest.startswith("VARIANT=")]
    assert variant == "VARIANT=cpu"


def test_the_image_installs_by_the_constraints() -> None:
    installs = [
        part
        for key, rest in instructions()
        if key == "RUN"
        for part in rest.split("&&")
        if "pip install" in part
    ]
    assert len(installs) == 5
    for part in installs:
        assert "-c constraints.txt" in part or "--no-deps /wheels/" in part, part
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    for name, version in re.findall(r"\b([a-z][\w-]*)==([\w.]+)", DOCKERFILE):
        assert f"{name}=={version}" in pinned


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_the_image_s_requirements_are_the_project_s(tmp_path: Path, variant: str) -> None:
    [script] = [rest.split("&&")[0] for key, rest in instructions() if key == "RUN" and "tomllib" in rest]
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    script = script.replace("python -c", f"{shlex.quote(sys.executable)} -c")
    subprocess.run(["sh", "-ec", script], cwd=tmp_path, env={"VARIANT": variant}, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["demo"], *(extras["gpu"] if variant == "cuda" else ())]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == wanted


# ---- on this machine ------------------------------------------------------------------------------------


def own_namespaces() -> list[str]:
    """The command that runs another one with network, mounts and process ids of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("needs util-linux' unshare")
    for user in ([], ["--map-root-user"]):
        command = ["unshare", *user, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        check = [*command, "mount", "-t", "tmpfs", "tmpfs", "/run"]
        if subprocess.run(check, capture_output=True, check=False).returncode == 0:
            return command
    pytest.skip("needs the right to make namespaces of its own (unshare)")


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(480)
def test_the_commands_run_outside_containers_as_written(tmp_path: Path, model_folder: Path) -> None:
    """Word by word, in namespaces of their own, where the containers' ports and folders are free: started in
    the order of depends_on, until healthy; a request; an orderly end.
    """
    isolated = own_namespaces()
    binaries = tmp_path / "bin"
    binaries.mkdir()
    script = binaries / "specbridge"  # what pip would install
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m specbridge.cli "$@"\n')
    script.chmod(0o755)
    plan = [
        {
            "name": name,
            "command": compose.command(spec),
            "health": compose.health(spec),
            "after": {k: v["condition"] for k, v in spec.get("depends_on", {}).items()},
        }
        for name, spec in compose.ours("cpu").items()
    ]
    metrics = {job: f"127.0.0.1:{address.split(':')[1]}" for job, address in scraped().items()}
    (tmp_path / "plan.json").write_text(json.dumps({"services": plan, "metrics": metrics}))
    environment = {
        **os.environ,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SPECBRIDGE_CACHE_DIR": str(cache_dir()),  # the containers' is a volume
        "SPECBRIDGE_WARMUP_REPEATS": "0",  # curves are for --budget cost, and take this test's longest time
    }
    assert model_folder.is_relative_to(cache_dir())
    command = [*isolated, sys.executable, compose_on_host.__file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    logs = "".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    result = json.loads((tmp_path / "result.json").read_text())
    assert "error" not in result, result["error"] + "\n" + done.stderr + logs
    assert result["answer"]["usage"]["completion_tokens"] == 8, result["answer"]
    shown = result["metrics"]
    assert "\nspecbridge_draft_channel_attached 1.0" in shown["draft"]
    sent = re.findall(
        r'^specbridge_target_channel_bytes_total\{.*"shared_memory".*\} (\S+)$', shown["target"], re.M
    )
    assert sum(map(float, sent)) > 0, "the hidden states went another way than through shared memory"
    assert "specbridge_gateway_generation_tokens_total" in shown["gateway"]
    assert result["exit_codes"] == dict.fromkeys(ROLES, 0), logs
    assert "Traceback" not in GRPC_STOPPED.sub("", logs)
