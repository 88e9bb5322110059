"""A real Prometheus scrapes a running stack with the shipped configuration, and answers with our series."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import httpx
import pytest
from running_stack import REPO, RunningStack, wait_for

from specbridge.stack import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="needs the prometheus binary (apt-get install prometheus)"
    ),
]

# PromQL → what it tells; each must have a sample after some requests.
SERIES = {
    "specbridge_gateway_requests_total": "requests by outcome",
    "specbridge_gateway_prompt_tokens_total": "tokens in",
    "specbridge_gateway_generation_tokens_total": "tokens out",
    "histogram_quantile(0.5, specbridge_gateway_time_to_first_token_seconds_bucket)": "TTFT",
    "histogram_quantile(0.5, specbridge_gateway_inter_token_latency_seconds_bucket)": "inter-token latency",
    "histogram_quantile(0.5, specbridge_gateway_e2e_request_latency_seconds_bucket)": "latency in all",
    "specbridge_gateway_requests_running": "running",
    "specbridge_gateway_requests_waiting": "queue",
    "specbridge_gateway_spec_decode_drafts_total": "drafts",
    "specbridge_gateway_spec_decode_draft_tokens_total": "draft tokens",
    "specbridge_gateway_spec_decode_accepted_tokens_total": "accepted tokens",
    "specbridge_gateway_spec_decode_accepted_tokens_per_position_total": "accepted by position",
    "1 + specbridge_gateway_spec_decode_accepted_tokens_total"
    " / specbridge_gateway_spec_decode_drafts_total": "acceptance length",
    "specbridge_gateway_round_draft_seconds_sum": "where a round's time goes",
    "specbridge_target_kv_pages_used": "KV pages",
    "specbridge_target_prefix_hits_tokens_total": "prefix hits",
    "specbridge_target_channel_bytes_total": "channel bytes by transport",
    "specbridge_draft_channel_attached": "the channel is up",
}


@pytest.fixture(scope="module")
def prometheus(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address; it scrapes `stack` every second, otherwise as in deploy/prometheus."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = (REPO / "deploy/prometheus/prometheus.yml").read_text()
    assert "scrape_interval: 5s" in config
    config = config.replace("scrape_interval: 5s", "scrape_interval: 1s")
    for service in ("target", "draft", "gateway"):
        place = next(line.split('"')[1] for line in config.splitlines() if f'targets: ["{service}:' in line)
        url = httpx.URL(str(stack.state["endpoints"][f"{service} metrics"]))
        config = config.replace(place, f"{url.host}:{url.port}")
    (folder / "prometheus.yml").write_text(config)
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_for(lambda: httpx.get(f"http://{address}/-/ready").status_code == 200, 60, "prometheus ready")
        yield address
    finally:
        process.terminate()
        process.wait(30)


def query(address: str, promql: str) -> list[dict[str, object]]:
    reply = httpx.get(f"http://{address}/api/v1/query", params={"query": promql}, timeout=10).json()
    assert reply["status"] == "success", reply
    return list(reply["data"]["result"])


def test_every_documented_series_is_there(stack: RunningStack, prometheus: str) -> None:
    for text in ("one and the same prompt, longer than a page of tokens",) * 2:
        body = {"model": "target", "prompt": text, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        assert httpx.post(f"{stack.url}/v1/completions", json=body, timeout=120).status_code == 200

    def all_up() -> bool:
        up = {item["metric"]["job"]: item["value"][1] for item in query(prometheus, "up")}  # type: ignore[index]
        return up == {"target": "1", "draft": "1", "gateway": "1"}

    wait_for(all_up, 30, "three targets up")
    missing: list[str] = []

    def none_missing() -> bool:
        missing[:] = [promql for promql in SERIES if not query(prometheus, promql)]
        return not missing

    try:
        wait_for(none_missing, 20, "all series")
    except AssertionError:
        pytest.fail(f"no sample of {missing}")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
@pytest.mark.parametrize("service", ["target", "draft", "gateway"])
def test_names_and_types_follow_the_conventions(stack: RunningStack, service: str) -> None:
    text = httpx.get(str(stack.state["endpoints"][f"{service} metrics"]), timeout=10).text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
