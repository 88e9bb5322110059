"""The mean round of some bursts, out of what the processes counted.

Owns the names of the metrics that explain reads and the division by rounds. Does not own the bursts (measure)
nor the arithmetic of bytes (account).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbridge.explain.account import Point, Work
from specbridge.explain.clients import Samples
from specbridge.explain.measure import Burst, added

STAGES = ("draft", "channel_wait", "verify", "rpc", "gateway")
"""What a gateway splits a round into (gateway.metrics); they add up to it."""
DRAFT_STAGES = ("queue", "append", "forward", "tree")


@dataclass(frozen=True, slots=True)
class MeanRound:
    """Seconds and counts of one round, the mean over `rounds`.

    draft_parts: within the draft's stage, by the draft's own clock; verify_queue_s: within verify.
    services_s: what target and draft themselves say they worked, to be compared with the stages. client_s:
    the clients' time per round, first token to last. collective_s: of a pass, on rank 0; 0 with one rank.
    """

    rounds: int
    seconds: float
    stages: dict[str, float]
    draft_parts: dict[str, float]
    verify_queue_s: float
    services_s: float
    client_s: float
    collective_s: float
    sessions: float
    nodes: float
    rows: float
    tokens: float
    work: Work

    @property
    def point(self) -> Point:
        """As a point of the curve over nodes: of one session."""
        sessions = self.sessions or 1.0
        draft_s = self.stages["draft"] + self.stages["channel_wait"]
        return Point(
            nodes=self.nodes / sessions,
            tokens=self.tokens / sessions,
            round_s=self.seconds,
            verify_s=self.stages["verify"],
            draft_s=draft_s,
        )

    @property
    def stage_sum(self) -> float:
        return sum(self.stages.values())


def mean_round(bursts: Sequence[Burst]) -> MeanRound | None:
    """None if no round was counted, as when the gateway's /metrics is not known."""
    counted = added(bursts)
    gateway, target, draft = counted["gateway"], counted["target"], counted["draft"]
    name = "specbridge_gateway_round"
    rounds = gateway.total(f"{name}_seconds_count")
    if rounds <= 0:
        return None

    def per_round(samples: Samples, metric: str, **labels: str) -> float:
        return samples.total(metric, **labels) / rounds

    stages = {stage: per_round(gateway, f"{name}_stage_seconds_total", stage=stage) for stage in STAGES}
    parts = {
        stage: per_round(draft, "specbridge_draft_stage_seconds_sum", stage=stage) for stage in DRAFT_STAGES
    }
    services = per_round(target, "specbridge_target_service_seconds_sum") + per_round(
        draft, "specbridge_draft_stage_seconds_sum", stage="service"
    )
    steps = target.total("specbridge_target_collective_steps_total")
    client_rounds = sum(burst.rounds for burst in bursts)
    return MeanRound(
        rounds=round(rounds),
        seconds=per_round(gateway, f"{name}_seconds_sum"),
        stages=stages,
        draft_parts=parts,
        verify_queue_s=per_round(target, "specbridge_target_queue_seconds_sum"),
        services_s=services,
        client_s=sum(burst.seconds for burst in bursts) / client_rounds if client_rounds else 0.0,
        collective_s=target.total("specbridge_target_collective_seconds_total") / steps if steps else 0.0,
        sessions=per_round(gateway, f"{name}_sessions_sum"),
        nodes=per_round(gateway, f"{name}_nodes_sum"),
        rows=per_round(gateway, f"{name}_rows_sum"),
        tokens=per_round(gateway, f"{name}_tokens_total"),
        work=_work(gateway, target, draft, rounds),
    )


def _work(gateway: Samples, target: Samples, draft: Samples, rounds: float) -> Work:
    context = target.total("specbridge_target_context_rows_total") / rounds
    captured = target.total("specbridge_target_captured_rows_total")
    published = target.total("specbridge_target_channel_bytes_total")
    # Passes run ahead of the question, and those run when it came.
    passes = draft.total("specbridge_draft_eager_drafts_total") + draft.total(
        "specbridge_draft_pass_sessions_count"
    )
    return Work(
        rows=gateway.total("specbridge_gateway_round_rows_sum") / rounds,
        committed=gateway.total("specbridge_gateway_round_tokens_total") / rounds,
        context_rows=context,
        context_rows_read=target.total("specbridge_target_context_rows_read_total") / rounds,
        context_rows_copied=target.total("specbridge_target_context_rows_copied_total") / rounds,
        hidden_row_bytes=published / captured if captured else 0.0,
        draft_passes=passes / rounds,
        draft_context_rows=context,
        appends=draft.total("specbridge_draft_appends_total") / rounds,
    )
