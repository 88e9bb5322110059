"""The gateway's metrics once more, under the names that vLLM publishes, for dashboards and benchmark tools
made for it (`--metrics-vllm-aliases`).

Owns the table of names and the labels that vLLM has and we don't. The numbers are the gateway's own, read
when somebody scrapes: aliases cost nothing in between. What vLLM says and we can't is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

ALIASES: Mapping[str, tuple[str, ...]] = {
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "target_kv_usage_ratio": ("kv_cache_usage_perc",),
    "preemptions": ("num_preemptions",),
    "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "cached_prompt_tokens": ("prefix_cache_hits",),
    "generation_tokens": ("generation_tokens",),
    "requests": ("request_success",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    # The second is the name of older releases, which many dashboards still read.
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "request_time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_queue_time_seconds": ("request_queue_time_seconds",),
    "request_prefill_time_seconds": ("request_prefill_time_seconds",),
    "request_decode_time_seconds": ("request_decode_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens", "request_max_num_generation_tokens"),
    "spec_decode_drafts": ("spec_decode_num_drafts",),
    "spec_decode_draft_tokens": ("spec_decode_num_draft_tokens",),
    "spec_decode_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "spec_decode_accepted_tokens_per_position": ("spec_decode_num_accepted_tokens_per_pos",),
}
"""Our names, without `specbridge_gateway_`, to vLLM's, without `vllm:`; of counters without `_total`."""

_LABELS = {"finish_reason": "finished_reason"}


class VllmAliases(Collector):
    """metrics: our collectors by name, each of one metric family. model_name: the label's value."""

    def __init__(
        self, metrics: Mapping[str, Collector], model_name: str, *, registry: CollectorRegistry
    ) -> None:
        self._sources = [(metrics[name], alias) for name, aliases in ALIASES.items() for alias in aliases]
        self._labels = {"model_name": model_name, "engine": "0"}
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        for source, alias in self._sources:
            for family in source.collect():
                yield self._renamed(family, f"vllm:{alias}")

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def _renamed(self, family: Metric, name: str) -> Metric:
        made = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
            suffix = sample.name.removeprefix(family.name)
            made.add_sample(name + suffix, {**self._labels, **labels}, sample.value)
        return made
