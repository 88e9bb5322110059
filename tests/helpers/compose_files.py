"""docker-compose.yml as a container engine would read it, and the tool that judges it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from command_lines import ROOT, with_defaults
from debian_tools import program

FILE = ROOT / "docker-compose.yml"
PROFILES = ("cpu", "gpu")
# What Debian's docker-compose is written in, beyond a bare Python.
_NEEDED = (
    *(
        "attr",
        "cached-property",
        "certifi",
        "chardet",
        "distro",
        "docker",
        "dockerpty",
        "docopt",
        "dotenv",
        "idna",
    ),
    *(
        "jsonschema",
        "pkg-resources",
        "pyrsistent",
        "requests",
        "six",
        "texttable",
        "urllib3",
        "websocket",
        "yaml",
    ),
)


def read() -> dict[str, Any]:
    """The file, with the default of each variable in its place."""
    return dict(yaml.safe_load(with_defaults(FILE.read_text())))


def services(profile: str) -> dict[str, dict[str, Any]]:
    """Those of a profile, by name."""
    return {name: spec for name, spec in read()["services"].items() if profile in spec["profiles"]}


def ours(profile: str) -> dict[str, dict[str, Any]]:
    """Those that run our image."""
    return {name: spec for name, spec in services(profile).items() if spec["image"].startswith("specbridge:")}


def command(spec: dict[str, Any]) -> list[str]:
    """What a service's container runs."""
    return ["specbridge", *shlex.split(spec["command"])]


def health(spec: dict[str, Any]) -> list[str]:
    kind, *words = spec["healthcheck"]["test"]
    assert kind == "CMD"
    return list(words)


def compose_tool() -> tuple[list[str], dict[str, str]]:
    """(command, environment) of Docker's plugin, or of a docker-compose on the PATH, or of Debian's. Skips
    the test where none is to be had.
    """
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("SPECBRIDGE_", "COMPOSE_", "HF_"))
    }
    docker = shutil.which("docker")
    if (
        docker
        and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0
    ):
        return [docker, "compose"], environment
    if found := shutil.which("docker-compose"):
        return [found], environment
    script = Path(
        program("docker-compose", package="docker-compose", also=tuple(f"python3-{n}" for n in _NEEDED))
    )
    system = "/usr/bin/python3"  # of the version that Debian's compiled modules are for
    environment["PYTHONPATH"] = str(script.parents[1] / "lib/python3/dist-packages")
    return [system if Path(system).exists() else sys.executable, str(script)], environment
