"""Run a profile's containers as plain processes, their commands word by word as in docker-compose.yml.

As a script, in namespaces of its own (`unshare`), in which the containers' folders and ports are free:
`compose_on_host.py FOLDER` reads FOLDER/plan.json ([{name, command, health, after: {name: condition}}] and
the Prometheus targets), starts each service once those it waits for are as it wants them, sends one request,
and writes FOLDER/result.json. Logs go to FOLDER/NAME.log.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SOCKETS = Path("/run/specbridge")
START_S = 240.0
BODY = {"model": "smollm2-135m", "prompt": "Water boils at", "max_tokens": 8, "temperature": 0}


def loopback_up() -> None:
    """`ip link set lo up`, without the tool."""
    get, put, up = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = fcntl.ioctl(any_socket, get, struct.pack("16sh", b"lo", 0) + bytes(14))
        flags = struct.unpack("16sh", asked[:18])[1]
        fcntl.ioctl(any_socket, put, struct.pack("16sh", b"lo", flags | up) + bytes(14))


def healthy(service: dict[str, Any]) -> bool:
    return subprocess.run(service["health"], stdout=subprocess.DEVNULL, check=False).returncode == 0


def start(folder: Path, plan: list[dict[str, Any]], started: dict[str, subprocess.Popen[bytes]]) -> None:
    """In the order of depends_on, until all are healthy. Raises if a service ends or takes too long."""
    deadline, well = time.monotonic() + START_S, set()
    while len(well) < len(plan):
        for service in plan:
            name, conditions = service["name"], service["after"]
            if name not in started:
                met = all(
                    other in well if condition == "service_healthy" else other in started
                    for other, condition in conditions.items()
                )
                if met:
                    with (folder / f"{name}.log").open("wb") as log:
                        started[name] = subprocess.Popen(service["command"], stdout=log, stderr=log)
            elif name not in well and healthy(service):
                well.add(name)
        for name, process in started.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not healthy: {sorted({s['name'] for s in plan} - well)}")
        time.sleep(1.5)  # a health check is a process that takes CPU from those it waits for


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}: {error.code} {error.read().decode()}") from None


def attached(url: str) -> bool:
    """Whether the draft has the target's hidden states."""
    return "\nspecbridge_draft_channel_attached 1.0" in fetch(url)


def main(folder: Path) -> None:
    given = json.loads((folder / "plan.json").read_text())
    started: dict[str, subprocess.Popen[bytes]] = {}
    loopback_up()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(SOCKETS.parent)], check=True)
    SOCKETS.mkdir()
    try:
        start(folder, given["services"], started)
        pages = {job: f"http://{address}/metrics" for job, address in given["metrics"].items()}
        deadline = time.monotonic() + START_S
        while not attached(pages["draft"]) and time.monotonic() < deadline:
            time.sleep(0.2)
        answer = json.loads(fetch("http://127.0.0.1:8000/v1/completions", BODY))
        result: dict[str, Any] = {
            "answer": answer,
            "metrics": {job: fetch(url) for job, url in pages.items()},
        }
        for process in reversed(started.values()):
            process.terminate()
        result["exit_codes"] = {name: process.wait(40) for name, process in started.items()}
    except Exception as error:
        result = {"error": repr(error)}
    finally:
        for process in started.values():
            process.kill()
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
