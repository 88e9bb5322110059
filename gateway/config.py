"""Settings of the gateway process: every field is a flag and a SPECBRIDGE_* variable.

Defaults are those measured on a two-core CPU machine with the built-in model (docs/architecture.md); before a
target on a GPU two of them are others (specbridge.fixed_rows).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

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
    metrics_vllm_aliases: bool = False
    """Show the metrics under vLLM's names as well (`vllm:...`), for dashboards and tools made for it."""
    model_name: str = ""
    """Names the model is served under, comma-separated, the first is reported; empty: from --target."""
    api_key: str = Field(default="", repr=False)
    """Bearer tokens, comma-separated, one of which /v1 requests must carry; empty: none. Requests that wait
    are served in fair shares of tokens a key.
    """
    budget: Literal["fixed", "cost"] = "fixed"
    """How much is drafted and verified. fixed: what the next three say; cost: what brings the most tokens per
    second by measured costs and acceptance, plain decoding included.
    """
    tree_budget: int = Field(default=_LIMITS.tree_budget, ge=0)
    """Most nodes of one draft tree with --budget fixed; 0: no speculation at all, whatever the budget. Not
    given, and the target on a GPU: 16, or its --max-tree-nodes if that is less.
    """
    max_verify_rows: int = Field(default=_LIMITS.max_verify_rows, ge=1)
    """Rows of one verify pass, shared among the running sessions, with --budget fixed; of --cohorts 2 each
    group's pass has the part of its sessions. Not given, and the target on a GPU: 264.
    """
    min_tree: int = Field(default=_LIMITS.min_tree, ge=0)
    """A session's share of nodes below which the round skips the draft, with --budget fixed."""
    max_queue: int = Field(default=_LIMITS.max_queue, ge=0)
    """Requests that may wait; more are refused with 429 / RESOURCE_EXHAUSTED."""
    max_queue_tokens: int = Field(default=_LIMITS.max_queue_tokens, ge=1)
    """Tokens, of prompts and expected outputs, that may wait; more are refused likewise."""
    max_running: int = Field(default=_LIMITS.max_running, ge=1)
    """Sessions decoding at the same time."""
    priority_ageing: float = Field(default=_LIMITS.priority_ageing, gt=0)
    """Seconds of waiting that make a request one step of `priority` more urgent."""
    draft_timeout: float = Field(default=_LIMITS.draft_timeout, gt=0)
    """Seconds to wait for a draft before the round goes on without trees."""
    cohorts: Literal["auto", "1", "2"] = "auto"
    """Groups of sessions whose rounds alternate: with 2, one is drafted for while the other is verified;
    auto: two while that brings more (--budget cost decides, with fixed it is one).
    """
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

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        # A tree budget of 0 turns any budget off.
        given = [n for n in ("tree_budget", "max_verify_rows", "min_tree") if n in self.model_fields_set]
        given = [name for name in given if name != "tree_budget" or self.tree_budget]
        if self.budget == "cost" and given:
            name = "--" + given[0].replace("_", "-")
            raise ValueError(f"--budget cost goes by what it measures; drop {name}, or give --budget fixed")
        return self

    def limits(self) -> SchedulerLimits:
        """The scheduler's numbers. Raises ConfigError for values that contradict each other."""
        return SchedulerLimits(
            tree_budget=self.tree_budget,
            max_verify_rows=self.max_verify_rows,
            by_device=frozenset({"tree_budget", "max_verify_rows"} - self.model_fields_set),
            min_tree=self.min_tree,
            max_queue=self.max_queue,
            max_queue_tokens=self.max_queue_tokens,
            priority_ageing=self.priority_ageing,
            max_running=self.max_running,
            budget=self.budget,
            cohorts=0 if self.cohorts == "auto" else int(self.cohorts),
            draft_timeout=self.draft_timeout,
            give_up=self.give_up,
        )

    def names(self) -> tuple[str, ...]:
        """Names requests may use for the model: the reported one first, --target always last."""
        given = [name.strip() for name in self.model_name.split(",") if name.strip()]
        if not given:
            given = [self.target.rstrip("/").rsplit("/", 1)[-1] or self.target]
        return tuple(dict.fromkeys([*given, self.target]))
