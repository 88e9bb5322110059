"""A real Prometheus with the shipped configuration and rules beside a running stack: every expression of the
dashboards and of the rules has data under load, and alerts come and go with what they tell of.
"""

from __future__ import annotations

import math
import re
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import metrics_catalogue as catalogue
import pytest
from debian_tools import program
from running_stack import RunningStack, running_stack, wait_for

from benchmarks.watching import watching

pytestmark = pytest.mark.slow

SERVICES = ("target", "draft", "gateway")
# Expressions without data here, by the series that they miss.
ELSEWHERE = {
    "specbridge_target_collective_seconds_total": "one rank has no collectives",
    "specbridge_target_gpu_memory_bytes": "no GPU",
    "specbridge_target_memory_bytes": "no GPU, no plan of its memory",
    "specbridge_draft_gpu_memory_bytes": "no GPU",
    "specbridge_draft_recent_acceptance_length": "simulated acceptance is not judged: the last test has it",
    "specbridge_draft_selfcheck_acceptance": "no self-check of simulated acceptance, nor of the tiny models",
}


# These judge how fast the machine is, which the suite shares with whatever else runs on it; a healthy hour of
# load (benchmarks.soak) must not set them off either.
TIMED = {"SpecBridgeSlowFirstToken", "SpecBridgeSlowTokens", "SpecBridgeDraftFallbacks"}


@pytest.fixture(scope="module")
def simulated(tiny_models: tuple[Path, Path]) -> Iterator[RunningStack]:
    """Acceptance is simulated: of random weights next to nothing is right, and panels would have no data."""
    target, drafter = tiny_models
    with running_stack(
        f"--target={target}",
        f"--draft={drafter}",
        "--dtype=float32",
        "--simulate-acceptance=3",
        "--metrics-vllm-aliases",
        "--budget=cost",  # its panels need one that expects something
    ) as running:
        yield running


@contextmanager
def watched(stack: RunningStack, folder: Path) -> Iterator[str]:
    """host:port of a Prometheus that looks each second, and whose alerts fire after one second."""
    binary = program("prometheus", package="prometheus")
    metrics = {service: str(stack.state["endpoints"][f"{service} metrics"]) for service in SERVICES}
    with watching(binary, metrics, folder, seconds=1) as url:
        yield url.removeprefix("http://")


@pytest.fixture(scope="module")
def prometheus(simulated: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with watched(simulated, tmp_path_factory.mktemp("prometheus")) as address:
        yield address


# One client: each new one reads all certificates of the system first.
CLIENT = httpx.Client(timeout=120)


@pytest.fixture(scope="module", autouse=True)
def _closed_client() -> Iterator[None]:
    yield
    CLIENT.close()


def query(address: str, promql: str) -> list[dict[str, object]]:
    reply = CLIENT.get(f"http://{address}/api/v1/query", params={"query": promql}).json()
    assert reply["status"] == "success", (promql, reply)
    return list(reply["data"]["result"])


def has_number(address: str, promql: str) -> bool:
    return any(math.isfinite(float(item["value"][1])) for item in query(address, promql))  # type: ignore[index]


def alerts_of(address: str, state: str = "firing") -> set[str]:
    found = query(address, f'ALERTS{{alertstate="{state}"}}')
    return {item["metric"]["alertname"] for item in found}  # type: ignore[index]


def all_expressions() -> dict[str, str]:
    """Expression → where it stands. Of alerts the condition's value, true or not."""
    found = {}
    for name, dashboard in catalogue.dashboards().items():
        for panel in catalogue.panels(dashboard):
            for target in panel["targets"]:
                found[catalogue.concrete(target["expr"])] = f"{name}: {panel['title']}"
    for rule in catalogue.rules():
        if "record" in rule:
            found[rule["expr"]] = found[rule["record"]] = rule["record"]
        else:
            found[re.sub(r"(==|>|<) (?=[\d.]+)", r"\1 bool ", rule["expr"])] = rule["alert"]
    return found


def complete(
    stack: RunningStack, prompt: str = "a prompt that is longer than a page", **more: object
) -> httpx.Response:
    body = {"model": "target", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    return CLIENT.post(f"{stack.url}/v1/completions", json={**body, **more})


@contextmanager
def steady_load(stack: RunningStack) -> Iterator[None]:
    """One short request after the other, as long as the body runs."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.3):
            reply = complete(stack, "a prompt much like the one before it", max_tokens=12)
            assert reply.status_code == 200, reply.text

    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(work)
        try:
            yield
        finally:
            stop.set()
        worker.result()


def put_load(stack: RunningStack) -> None:
    """A bit of everything that the dashboards show."""
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda i: complete(stack, f"{'the same start ' * 3}{i % 2}"), range(6)))
    assert {reply.status_code for reply in replies} == {200}, replies[0].text
    assert complete(stack, max_tokens=10**6).status_code == 400
    body = {"model": "target", "prompt": "left early", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with CLIENT.stream("POST", f"{stack.url}/v1/completions", json=body) as reply:
        next(reply.iter_lines())


def test_every_panel_and_rule_has_data_under_load(simulated: RunningStack, prometheus: str) -> None:
    def all_up() -> bool:
        up = {item["metric"]["job"]: item["value"][1] for item in query(prometheus, "up")}  # type: ignore[index]
        return up == dict.fromkeys(SERVICES, "1")

    wait_for(all_up, 30, "three targets up")
    put_load(simulated)
    places = all_expressions()
    missing = dict(places)

    def none_missing() -> bool:
        for promql in [p for p in missing if has_number(prometheus, p)]:
            del missing[promql]
        return not any(not set(ELSEWHERE) & catalogue.reads(promql).names for promql in missing)

    try:
        with steady_load(simulated):
            wait_for(none_missing, 30, "data of all expressions")
    except AssertionError:
        pytest.fail(f"no number of {missing}")
    assert {name for promql in missing for name in catalogue.reads(promql).names} >= set(ELSEWHERE), (
        "what is said to have no data here has some"
    )
    assert query(prometheus, 'vllm:generation_tokens_total{model_name="target",engine="0"}')
    assert alerts_of(prometheus) - TIMED == set()


def test_a_killed_draft_sets_off_its_alert_until_it_is_back(simulated: RunningStack, prometheus: str) -> None:
    assert "SpecBridgeDraftDown" not in alerts_of(prometheus) | alerts_of(prometheus, "pending")
    with steady_load(simulated):
        simulated.kill("draft")
        wait_for(lambda: "SpecBridgeDraftDown" in alerts_of(prometheus), 30, "the alert of the killed draft")
        wait_for(lambda: "SpecBridgeDraftDown" not in alerts_of(prometheus), 90, "the alert's end")
        wait_for(simulated.draft_connected, 20, "a stream to the draft")
        # The channel is attached again a moment after the stream is there, on a busy machine some moments.
        wait_for(lambda: not alerts_of(prometheus) - TIMED, 60, "the end of the other alerts")


@pytest.mark.parametrize("service", SERVICES)
def test_names_and_types_follow_the_conventions(simulated: RunningStack, service: str) -> None:
    promtool = program("promtool", package="prometheus")
    text = httpx.get(str(simulated.state["endpoints"][f"{service} metrics"]), timeout=10).text
    own = "".join(line for line in text.splitlines(keepends=True) if "vllm:" not in line)
    assert own != text or service != "gateway"
    done = subprocess.run([promtool, "check", "metrics"], input=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_random_weights_set_off_the_alert_on_acceptance(stack: RunningStack, tmp_path: Path) -> None:
    """The stack of the other files has a drafter of random weights, and nothing simulated."""
    with watched(stack, tmp_path) as prometheus, steady_load(stack):
        wait_for(lambda: "SpecBridgeAcceptanceCollapse" in alerts_of(prometheus), 60, "the alert")
        [judged] = [p for p in all_expressions() if "specbridge_draft_recent_acceptance_length" in p]
        wait_for(lambda: has_number(prometheus, judged), 30, "acceptance judged by the draft")
