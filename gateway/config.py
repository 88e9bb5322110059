"""Settings of the gateway process: every field is a flag and a SPECBRIDGE_* variable.

Defaults are those measured on a two-core CPU machine with the built-in model (docs/architecture.md).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gateway.limits import SchedulerLimits
from specbridge.settings import Settings

_LIMITS = SchedulerLimits()


class GatewaySettings(Settings):
    """What `specbridge gateway` takes."""

    target: str = "smollm2-135m"
    """The target model (folder, Hugging Face id or built-in name), for its tokenizer and chat template."""
    tokenizer: str = ""
    """A folder with another tokenizer.json than --target's; `bytes`: a stand-in for models that have none,
    one token a byte and `<id>` for the ids beyond. Empty: --target's.
    """
    target_address: str = "127.0.0.1:50051"
    """Where the target service listens: unix:/path or host:port."""
    draft_address: str = ""
    """Where the draft service listens; empty: decode without speculation."""
    http_host: str = "127.0.0.1"
    """Address the REST API binds to."""
    http_port: int = Field(default=8000, ge=0, le=65535)
    """Port of the REST API; 0 picks a free one."""
    grpc_listen: str = "127.0.0.1:50050"
    """Address of the gRPC Generation service: unix:/path or host:port; empty: no gRPC."""
    metrics_host: str = "127.0.0.1"
    """Address of the separate metrics port."""
    metrics_port: int = Field(default=-1, ge=-1, le=65535)
    """A separate port for /metrics; -1: only on the REST port, 0 picks a free one."""
    model_name: str = ""
    """Names the model is served under, comma-separated, the first is reported; empty: from --target."""
    api_key: str = Field(default="", repr=False)
    """Bearer token that /v1 requests must carry; empty: none."""
    tree_budget: int = Field(default=_LIMITS.tree_budget, ge=0)
    """Most nodes of one draft tree."""
    max_verify_rows: int = Field(default=_LIMITS.max_verify_rows, ge=1)
    """Rows of one verify pass, shared among the running sessions."""
    min_tree: int = Field(default=_LIMITS.min_tree, ge=0)
    """A session's share of nodes below which the round skips the draft."""
    max_queue: int = Field(default=_LIMITS.max_queue, ge=0)
    """Requests that may wait; more are refused with 429 / RESOURCE_EXHAUSTED."""
    max_running: int = Field(default=_LIMITS.max_running, ge=1)
    """Sessions decoding at the same time."""
    draft_timeout: float = Field(default=_LIMITS.draft_timeout, gt=0)
    """Seconds to wait for a draft before the round goes on without trees."""
    cohorts: int = Field(default=_LIMITS.cohorts, ge=1, le=2)
    """Groups of sessions whose rounds alternate: with 2, one is drafted for while the other is verified."""
    give_up: float = Field(default=_LIMITS.give_up, gt=0)
    """Seconds without a target after which a request fails."""
    request_stats: Literal["summary", "detailed"] = "summary"
    """`metrics.speculative_decoding` of responses; detailed adds one entry per round."""
    drain: float = Field(default=30.0, ge=0)
    """Seconds that running requests get to finish after SIGTERM."""
    max_body: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Most bytes of a REST request's body."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged."""

    def limits(self) -> SchedulerLimits:
        """The scheduler's numbers. Raises ConfigError for values that contradict each other."""
        return SchedulerLimits(
            tree_budget=self.tree_budget,
            max_verify_rows=self.max_verify_rows,
            min_tree=self.min_tree,
            max_queue=self.max_queue,
            max_running=self.max_running,
            cohorts=self.cohorts,
            draft_timeout=self.draft_timeout,
            give_up=self.give_up,
        )

    def names(self) -> tuple[str, ...]:
        """Names requests may use for the model: the reported one first, --target always last."""
        given = [name.strip() for name in self.model_name.split(",") if name.strip()]
        if not given:
            given = [self.target.rstrip("/").rsplit("/", 1)[-1] or self.target]
        return tuple(dict.fromkeys([*given, self.target]))
