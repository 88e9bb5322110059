"""Settings of the draft service: every field is a flag and a SPECBRIDGE_* environment variable."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from specbridge.settings import Settings


class DraftSettings(Settings):
    """How one draft service runs."""

    draft: str = "auto"
    """Drafter: a folder, a Hugging Face id, or "auto" for the one shipped for the built-in target."""
    target: str = "smollm2-135m"
    """Target whose embedding, head and tokenizer are borrowed: a folder, a Hugging Face id or built-in name.
    """
    load_format: Literal["auto", "dummy"] = "auto"
    """"dummy": random weights of the configurations' shapes, no checkpoint read; to measure time only."""
    config: str = ""
    """With load-format dummy: the target's config.json, or a folder that holds one; empty: --target's."""
    drafter_config: str = ""
    """With load-format dummy: the drafter's config.json (z-lab or speculators layout), or a folder that holds
    one; empty: --draft's, or the folder `dflash` beside the target's.
    """
    simulate_acceptance: str = ""
    """Propose as if right as often as this acceptance file, or a mean acceptance length, says; the target
    needs the same. Empty: off.
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
    shared_noise: bool = True
    """Grow the trees of sampled requests from marginals with the target's own noise on them. Off: from the
    marginals alone, as for greedy ones; the same text, fewer of it foreseen.
    """
    eager: bool = True
    """Begin a session's block pass when its hidden states arrive, before the gateway asks."""
    cuda_graphs: bool = True
    """On a GPU, replay the draft pass as CUDA graphs, captured at the start. Off: the same trees, slower."""
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
    tree_scores: Literal["auto", "marginals", "bigrams"] = "auto"
    """What a node is worth: the drafter's marginals alone, or corrected by which token stands before it, for
    which the drafter's folder needs draft_bigrams.safetensors. "auto": corrected where that file is, but by
    marginals on a GPU, where bigrams have not been measured yet. The same text, more or less of it foreseen.
    """
    top_k: int = Field(default=0, ge=0)
    """Most candidate tokens per position, or with bigrams per node; 0: as many as the tree can use."""
    draft_vocabulary: int = Field(default=-1, ge=-1)
    """Tokens the drafter may propose: the most frequent of its draft_vocabulary.safetensors. 0: all; -1: as
    the drafter's folder says, all if it says nothing.
    """
    trim_block: bool = True
    """On a CPU, leave out up to a quarter of a block's rows where the trees asked for are too shallow to use
    them.
    """
    session_lease: float = Field(default=10.0, gt=0)
    """Seconds that the sessions of a gateway outlive its broken stream."""
    idle_lease: float = Field(default=600.0, gt=0)
    """Seconds without a proposal or a row after which a session is freed although its gateway is connected.
    """
    project_on_target: bool = False
    """Have the target apply the drafter's first product (fc and its norm) to the hidden states: a row is then
    one hidden size wide instead of one a tap.
    """
    transport: Literal["auto", "cuda_ipc", "shared_memory", "inline"] = "auto"
    """Hidden-state transport; "auto" lets the handshake choose the best that works."""
    take_over: bool = False
    """Displace a draft that is attached to the target already; without, this one waits until it is gone."""
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

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        for name, value in (("config", self.config), ("drafter_config", self.drafter_config)):
            if value and self.load_format != "dummy":
                raise ValueError(
                    f"{name} {value!r} is read with load_format dummy only; a real drafter brings its own, "
                    "name it with --draft and its target with --target"
                )
        if self.synthetic and self.tree_scores == "bigrams":
            raise ValueError(
                "tree_scores bigrams needs a drafter whose proposals are its own; leave it out with "
                "load_format dummy or simulate_acceptance"
            )
        return self

    @property
    def synthetic(self) -> bool:
        """Nothing this drafter proposes is its own: there is nothing to check about it."""
        return self.load_format == "dummy" or bool(self.simulate_acceptance)
