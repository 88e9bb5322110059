"""Settings of the draft service: every field is a flag and a SPECBRIDGE_* environment variable."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from specbridge.settings import Settings


class DraftSettings(Settings):
    """How one draft service runs."""

    draft: str = "auto"
    """Drafter: a folder, a Hugging Face id, or "auto" for the one shipped for the built-in target."""
    target: str = "smollm2-135m"
    """Target whose embedding, head and tokenizer are borrowed: a folder, a Hugging Face id or built-in name.
    """
    target_address: str = "127.0.0.1:50051"
    """Where the target service listens: unix:/path or host:port."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1"; "auto" takes a GPU if there is one."""
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights; "auto" takes the drafter checkpoint's."""
    listen: str = "127.0.0.1:0"
    """Address to serve on, "unix:/path" or "host:port"; port 0 picks one."""
    metrics_host: str = "127.0.0.1"
    """Interface of the /metrics endpoint."""
    metrics_port: int = Field(default=0, ge=-1, le=65535)
    """Port of the /metrics endpoint; 0 picks one, -1 turns it off."""
    window: int = Field(default=0, ge=0)
    """Context rows the drafter attends to, counted back from the anchor; 0: all."""
    propose_wait: float = Field(default=-1.0, ge=-1.0, le=10.0)
    """Seconds to wait for hidden states that are on their way; -1: 0.02 on a CPU, 0.003 on a GPU."""
    append: Literal["fused", "sequential"] = "fused"
    """Context append: one stacked K/V product for all layers, or layer by layer. Equal results."""
    eager: bool = True
    """Begin a session's block pass when its hidden states arrive, before the gateway asks."""
    kv_tokens: int = Field(default=0, ge=0)
    """Context tokens held in all, cached prefixes included; 0: 4 sessions of max_length, at most 64 Ki
    tokens.
    """
    max_length: int = Field(default=0, ge=0)
    """Most tokens, prompt and output, of one session; 0: what the target's configuration allows."""
    max_sessions: int = Field(default=256, ge=1)
    """Most open sessions."""
    max_tree_nodes: int = Field(default=64, ge=0, le=4096)
    """Largest tree grown for one session, whatever a gateway asks for."""
    top_k: int = Field(default=0, ge=0)
    """Most candidate tokens per position; 0: as many as the tree can use."""
    session_lease: float = Field(default=10.0, gt=0)
    """Seconds that the sessions of a gateway outlive its broken stream."""
    transport: Literal["auto", "shared_memory", "inline"] = "auto"
    """Hidden-state transport; "auto" lets the handshake choose the best that works."""
    sample_from_anchor: bool | None = None
    """Overrides the checkpoint's block convention: true, the anchor's own row is the first proposal."""
    selfcheck: bool = True
    """Once attached to a target, draft a short fixed text through it and report the acceptance."""
    selfcheck_rounds: int = Field(default=16, ge=0)
    """Greedy rounds of the traffic after which acceptance below `selfcheck_acceptance` is reported; 0: never.
    """
    selfcheck_acceptance: float = Field(default=1.2, ge=1.0)
    """Acceptance length under which the drafter is taken to be misread."""
    threads: int = Field(default=0, ge=0)
    """Compute threads; 0: the library's choice."""
    drain: float = Field(default=5.0, ge=0)
    """Seconds for calls under way at shutdown."""
    warmup_repeats: int = Field(default=3, ge=0)
    """Passes per point of the draft-cost curve; 0: do not measure."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines shown."""
