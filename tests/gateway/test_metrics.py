"""The gateway's metrics: what each record of the scheduler adds."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.generation import DeliveredRecord, RequestRecord, RoundRecord, RoundShare, SpecStats
from gateway.metrics import PREFIX, STAGES, GatewayMetrics, Histogram, round_stages
from specbridge.errors import CapacityError
from specbridge.rounds import DraftTimings, FinishReason


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics(CollectorRegistry())


def value(metrics: GatewayMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(PREFIX + name, labels)


def request(**changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "request_id": "r", "finish_reason": FinishReason.STOP, "prompt_tokens": 10, "output_tokens": 5,
        "cached_tokens": 4, "stats": SpecStats((0, 1, 1), 2, 2, 3, 4, 3, 5), "queue_s": 0.5,
        "first_token_s": 1.0, "total_s": 3.0,
    }  # fmt: skip
    return RequestRecord(**{**values, **changes})


def test_speculative_counters_follow_vllm(metrics: GatewayMetrics) -> None:
    metrics.on_delivered(DeliveredRecord(1, True, 0.7))
    metrics.on_delivered(DeliveredRecord(4, False, 0.2, (RoundShare(4, 8, 3),)))
    metrics.on_delivered(DeliveredRecord(3, False, 0.1, (RoundShare(1, 8, 0), RoundShare(2, 4, 1))))
    metrics.on_delivered(DeliveredRecord(1, False, 0.1, (RoundShare(1, 0, 0),)))
    assert value(metrics, "spec_decode_drafts_total") == 3
    assert value(metrics, "spec_decode_draft_tokens_total") == 20
    assert value(metrics, "spec_decode_accepted_tokens_total") == 4
    per_position = [
        value(metrics, "spec_decode_accepted_tokens_per_position_total", position=str(p)) for p in range(4)
    ]
    assert per_position == [2, 1, 1, 0]
    assert value(metrics, "acceptance_length_tokens_sum") == 4 + 3
    assert value(metrics, "acceptance_length_tokens_count") == 3
    assert value(metrics, "generation_tokens_total") == 9


def test_token_latencies_have_one_sample_a_token_and_ttft_one_a_request(metrics: GatewayMetrics) -> None:
    metrics.on_delivered(DeliveredRecord(3, True, 0.7))
    metrics.on_delivered(DeliveredRecord(4, False, 0.2))
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "time_to_first_token_seconds_sum") == pytest.approx(0.7)
    assert value(metrics, "inter_token_latency_seconds_count") == 4
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.2)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.06") == 4
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.04") == 0


def test_requests_by_reason_and_what_aborted_ones_cost(metrics: GatewayMetrics) -> None:
    metrics.on_request(request())
    metrics.on_request(request(finish_reason=FinishReason.LENGTH))
    metrics.on_request(request(finish_reason=FinishReason.ABORT, output_tokens=5))
    metrics.on_request(request(finish_reason=FinishReason.ABORT, output_tokens=0, error=RuntimeError("x")))
    reasons = {
        r: value(metrics, "requests_total", finish_reason=r) for r in ("stop", "length", "abort", "error")
    }
    assert reasons == {"stop": 1, "length": 1, "abort": 1, "error": 1}
    assert value(metrics, "aborted_tokens_total") == 5
    assert value(metrics, "prompt_tokens_total") == 40 and value(metrics, "cached_prompt_tokens_total") == 16
    assert value(metrics, "request_queue_time_seconds_sum") == 2.0
    assert value(metrics, "request_time_per_output_token_seconds_sum") == pytest.approx(3 * 0.5)
    assert value(metrics, "request_acceptance_length_tokens_sum") == pytest.approx(4 * 2.5)
    assert value(metrics, "request_acceptance_rate_ratio_sum") == pytest.approx(4 * 0.75)


def test_a_round_is_split_into_draft_verify_rpc_and_our_own_time(metrics: GatewayMetrics) -> None:
    metrics.on_round(
        RoundRecord(
            sessions=2,
            speculating=2,
            rows=10,
            nodes=8,
            tokens=5,
            accepted=3,
            total_s=0.1,
            draft_wait_s=0.03,
            verify_wait_s=0.06,
            draft_service_s=0.025,
            verify_service_s=0.058,
        )  # fmt: skip
    )
    metrics.on_round(
        RoundRecord(
            sessions=1,
            speculating=0,
            rows=1,
            nodes=0,
            tokens=1,
            accepted=0,
            total_s=0.05,
            verify_wait_s=0.049,
            verify_service_s=0.048,
            skipped="budget",
        )  # fmt: skip
    )
    assert (
        value(metrics, "rounds_total", kind="speculative")
        == value(metrics, "rounds_total", kind="plain")
        == 1
    )
    assert value(metrics, "rounds_draft_skipped_total", cause="budget") == 1
    assert value(metrics, "round_seconds_sum") == pytest.approx(0.15)
    assert value(metrics, "round_draft_seconds_count") == 1
    assert value(metrics, "round_verify_seconds_sum") == pytest.approx(0.109)
    assert value(metrics, "round_rpc_seconds_sum") == pytest.approx(0.005 + 0.002 + 0.001)
    assert value(metrics, "round_gateway_seconds_sum") == pytest.approx(0.01 + 0.001)
    assert value(metrics, "round_outside_seconds_sum") == pytest.approx(0.017 + 0.002)


def test_labels_stay_bounded_whatever_comes(metrics: GatewayMetrics) -> None:
    for i in range(200):
        metrics.on_fallback(f"cause-{i}", 1)
        metrics.on_reopen("target", f"cause-{i}")
        metrics.on_http("other", f"METHOD{i}", status=200)
        metrics.on_rejected(type(f"E{i}", (Exception,), {})())
        metrics.on_round(RoundRecord(1, 1, 1, 0, 1, 0, 0.1, skipped=f"cause-{i}"))
        metrics.on_delivered(DeliveredRecord(i + 1, False, 0.1, (RoundShare(i + 1, i + 1, i),)))
    metrics.on_fallback("draft_down", 3)
    metrics.on_rejected(CapacityError("x"))
    assert value(metrics, "fallbacks_total", cause="other") == 200
    assert value(metrics, "fallbacks_total", cause="draft_down") == 3
    assert value(metrics, "requests_rejected_total", error="CapacityError") == 1
    series = [s for family in metrics.registry.collect() for s in family.samples]
    assert len(series) < 800


def test_connection_gauges_and_queue(metrics: GatewayMetrics) -> None:
    metrics.watch(running=lambda: 3, waiting=lambda: 2, stall=lambda: 1.5, kv_usage=lambda: 0.25)
    told: list[bool] = []
    metrics.on_connection_changed = lambda: told.append(True)
    metrics.on_connection("target", True, "")
    assert value(metrics, "service_connected", service="target") == 1
    assert value(metrics, "service_connected", service="draft") == 0
    assert (value(metrics, "requests_running"), value(metrics, "requests_waiting")) == (3, 2)
    assert (value(metrics, "longest_stall_seconds"), value(metrics, "target_kv_usage_ratio")) == (1.5, 0.25)
    assert told == [True]


def test_histogram_exposition_is_cumulative_and_parses() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("x_seconds", "Text.", (0.1, 1.0), registry=registry)
    for sample, count in ((0.1, 2), (0.5, 3), (7.0, 1)):
        histogram.observe(sample, count)
    [family] = text_string_to_metric_families(generate_latest(registry).decode())
    samples = {(s.name.removeprefix(PREFIX), s.labels.get("le")): s.value for s in family.samples}
    assert samples == {
        ("x_seconds_bucket", "0.1"): 2,
        ("x_seconds_bucket", "1.0"): 5,
        ("x_seconds_bucket", "+Inf"): 6,
        ("x_seconds_count", None): 6,
        ("x_seconds_sum", None): pytest.approx(8.7),
    }


def test_every_name_follows_the_convention(metrics: GatewayMetrics) -> None:
    families = list(metrics.registry.collect())
    assert all(family.name.startswith(PREFIX) and family.documentation.endswith(".") for family in families)
    units = ("_seconds", "_tokens", "_ratio", "_rows", "_nodes", "_sessions", "_rounds")
    assert all(f.name.endswith(units) for f in families if f.type == "histogram")


def test_a_rounds_stages_add_up_whatever_the_services_report(metrics: GatewayMetrics) -> None:
    records = [
        RoundRecord(
            1, 1, 5, 4, 2, 1, 0.1, 0.03, 0.06, 0.025, 0.058, draft_timings=DraftTimings(0, 5_000_000)
        ),
        RoundRecord(1, 0, 1, 0, 1, 0, 0.05, 0.0, 0.049),  # no timings: the wait is all there is to say
        RoundRecord(1, 1, 2, 1, 1, 0, 0.04, 0.01, 0.02, 0.5, 0.6),  # another clock's second is longer
    ]
    for record in records:
        assert sum(round_stages(record)) == pytest.approx(record.total_s)
        metrics.on_round(record)
    assert round_stages(records[0]) == pytest.approx((0.02, 0.005, 0.058, 0.007, 0.01))
    assert value(metrics, "round_stage_seconds_total", stage="channel_wait") == pytest.approx(0.005)
    assert value(metrics, "round_stage_seconds_total", stage="rpc") == pytest.approx(0.007)
    total = sum(value(metrics, "round_stage_seconds_total", stage=stage) or 0 for stage in STAGES)
    assert total == pytest.approx(value(metrics, "round_seconds_sum"))


def test_trees_count_by_size(metrics: GatewayMetrics) -> None:
    for drafted, accepted in ((1, 1), (4, 2), (5, 3), (8, 0), (3000, 7)):
        metrics.on_delivered(
            DeliveredRecord(accepted + 1, False, 0.1, (RoundShare(accepted + 1, drafted, accepted),))
        )
    for nodes, drafts, accepted in (("1", 1, 1), ("4", 1, 2), ("8", 2, 3), ("more", 1, 7), ("2", 0, 0)):
        assert value(metrics, "spec_decode_drafts_by_size_total", nodes=nodes) == drafts
        assert value(metrics, "spec_decode_accepted_tokens_by_size_total", nodes=nodes) == accepted


def test_parts_of_a_request(metrics: GatewayMetrics) -> None:
    metrics.on_request(request())
    metrics.on_request(request(first_token_s=None, output_tokens=0, finish_reason=FinishReason.ABORT))
    for name, count, total in (
        ("request_queue_time_seconds", 2, 1.0),
        ("request_prefill_time_seconds", 1, 0.5),
        ("request_decode_time_seconds", 1, 2.0),
        ("request_rounds", 2, 6),
    ):
        assert value(metrics, f"{name}_count") == count, name
        assert value(metrics, f"{name}_sum") == pytest.approx(total), name


def test_a_stack_without_a_draft_has_no_series_that_says_it_is_down(metrics: GatewayMetrics) -> None:
    metrics.tell(model_name="m", version="1.2", drafts=False, vllm_aliases=False)
    assert value(metrics, "service_connected", service="draft") is None
    assert value(metrics, "service_connected", service="target") == 0
    assert value(metrics, "model_info", model_name="m", version="1.2") == 1
    assert not any(family.name.startswith("vllm:") for family in metrics.registry.collect())


def test_preemptions_are_reopens_of_one_cause(metrics: GatewayMetrics) -> None:
    for service, cause in (("target", "preempted"), ("target", "restarted"), ("draft", "error")):
        metrics.on_reopen(service, cause)
    assert value(metrics, "preemptions_total") == 1
    assert value(metrics, "session_reopens_total", service="target", cause="preempted") == 1
    assert value(metrics, "session_reopens_total", service="draft", cause="error") == 1
