"""What is shipped and how it starts: wheel, constraints, Makefile, image, compose file against the code."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specbridge import cli, serve
from specbridge.flags import add_flags
from specbridge.settings import load

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def constraints() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def test_packages_of_the_wheel_are_those_of_the_clone() -> None:
    listed = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    present = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "tests"}
    assert set(listed) == present


def test_every_dependency_has_an_exact_version_within_its_range() -> None:
    pinned = constraints()
    assert all(len(r.specifier) == 1 and next(iter(r.specifier)).operator == "==" for r in pinned.values())
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["demo"], *extras["dev"]]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name == "specbridge":
            continue
        version = next(iter(pinned[name].specifier)).version
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


def test_runtime_needs_no_test_library() -> None:
    names = {Requirement(text).name for text in PROJECT["project"]["dependencies"]}
    assert not names & {"transformers", "pytest", "kernels", "gguf"}


def test_scripts_exist() -> None:
    for target in PROJECT["project"]["scripts"].values():
        module, function = target.split(":")
        assert module == "specbridge.cli" and callable(getattr(cli, function))


def test_version_is_in_the_changelog_or_unreleased() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## Unreleased" in changelog or f"## {PROJECT['project']['version']}" in changelog


def test_ci_runs_what_everybody_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text()


def test_weights_package_has_one_version_everywhere() -> None:
    from specbridge.builtin import SMOLLM2

    for name in ("Makefile", "Dockerfile", "constraints.txt"):
        found = set(re.findall(r"llm[-_]smollm2==[\d.]+", (ROOT / name).read_text()))
        assert found == {SMOLLM2.requirement}, name


def check_command(words: list[str]) -> None:
    """A specbridge command line parses: the command and every flag and value exist."""
    assert words[0] == "specbridge", words
    name, rest = words[1], words[2:]
    assert name in cli.COMMANDS, name
    if name in serve.SERVICES or name == "serve":
        kind = serve.serve_settings() if name == "serve" else serve.settings_class(name)
        parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
        add_flags(parser, kind)
        load(kind, **vars(parser.parse_args(rest)))


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_commands_of_the_compose_file_exist(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = COMPOSE["services"][service]
    if "specbridge" not in str(spec.get("image", "")):
        return
    for name, value in (spec.get("environment") or {}).items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(value)))
    command = spec["command"]
    check_command(["specbridge", *(shlex.split(command) if isinstance(command, str) else command)])


def test_compose_shares_what_shared_memory_needs() -> None:
    """Case 43: without a common IPC and PID namespace the channel would fall back to inline."""
    services = COMPOSE["services"]
    assert services["target"]["ipc"] == "shareable"
    assert services["draft"]["ipc"] == "service:target" and services["draft"]["pid"] == "service:target"
    for name in ("target", "draft", "gateway"):
        assert services[name]["healthcheck"]["test"], name
        assert any("sockets" in str(volume) for volume in services[name]["volumes"]), name


def test_prometheus_scrapes_the_ports_of_the_compose_file() -> None:
    scrape = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    targets = {
        t for job in scrape["scrape_configs"] for group in job["static_configs"] for t in group["targets"]
    }
    hosts = {target.split(":")[0] for target in targets}
    assert hosts == {"target", "draft", "gateway"}
    text = (ROOT / "docker-compose.yml").read_text()
    assert all(target.split(":")[1] in text for target in targets)


def test_commands_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")  # continued lines
    for line in re.findall(r"^\s*(specbridge (?:serve|target|draft|gateway) .*)$", text, re.M):
        check_command(shlex.split(line, comments=True))
    for target in re.findall(r"\bmake ([a-z]+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target


def test_image_copies_what_it_installs_and_runs_as_nobody_special() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for name in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert re.search(rf"COPY.*\b{name}\b", text), name
    assert re.search(r"^USER (?!root)\w+", text, re.M)
