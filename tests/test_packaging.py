"""What is shipped: wheel, constraints, scripts, CI. (Image and compose file: test_deployment.py.)"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specbridge import cli

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


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
