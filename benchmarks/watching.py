"""A Prometheus with the shipped configuration and rules beside a stack, and what its alerts said.

Owns running it and the questions about alerts. Does not own the rules (deploy/prometheus) nor the stack.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.common import free_port
from benchmarks.dashboard_data import Prometheus

SHIPPED = Path(__file__).parents[1] / "deploy/prometheus"
READY_S = 60.0


@contextmanager
def watching(
    program: str | Path, metrics: Mapping[str, str], folder: Path, *, seconds: int | None = None
) -> Iterator[str]:
    """The URL of a Prometheus as in deploy/prometheus, but for the services' addresses, with its data in
    `folder`.

    program: path or name of the server's binary. metrics: URL of each job's /metrics. seconds: look and judge
    so often, and let alerts fire after one second, instead of what the files say. Raises OSError if there is
    no such program, RuntimeError (with its last words) if it does not get ready.
    """
    shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
    config = (folder / "prometheus.yml").read_text()
    for job, address in metrics.items():
        url = httpx.URL(address)
        config, found = re.subn(rf'targets: \["{job}:\d+"\]', f'targets: ["{url.host}:{url.port}"]', config)
        if found != 1:
            raise RuntimeError(f"{SHIPPED}/prometheus.yml has {found} jobs for {job}, not one")
    if seconds is not None:
        config = re.sub(r"(scrape|evaluation)_interval: \d+s", rf"\1_interval: {seconds}s", config)
        alerts = folder / "rules/alerts.yml"
        alerts.write_text(re.sub(r"for: \d+m", "for: 1s", alerts.read_text()))
    (folder / "prometheus.yml").write_text(config)
    address = f"127.0.0.1:{free_port()}"
    words = [str(program), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*words, f"--web.listen-address={address}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _wait_until_ready(process, f"http://{address}", folder / "log")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + READY_S
    while True:
        try:
            if httpx.get(f"{url}/-/ready", timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # not listening yet
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"Prometheus did not get ready; its last words:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


def alerts(url: str, minutes: float, state: str = "firing") -> dict[str, float]:
    """Alerts that were in `state` in the last `minutes`: name -> evaluations that found them so."""
    seconds = max(1, round(60 * minutes))
    found = Prometheus(url).instant(
        f'sum by (alertname) (count_over_time(ALERTS{{alertstate="{state}"}}[{seconds}s]))', time.time()
    )
    return {item["metric"]["alertname"]: float(item["value"][1]) for item in found}
