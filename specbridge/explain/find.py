"""Where the processes of a stack are: from its folder, by looking for one, or as told.

Owns nothing but addresses. `specbridge serve` writes them to stack.json in its run folder.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from specbridge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Addresses:
    """grpc, target, draft: gRPC addresses. rest: http://host:port. metrics: URLs by service. Empty or absent:
    not known."""

    grpc: str
    rest: str = ""
    target: str = ""
    draft: str = ""
    metrics: Mapping[str, str] | None = None

    def metrics_of(self, service: str) -> str:
        return (self.metrics or {}).get(service, "")


def of_folder(folder: Path) -> Addresses:
    """The stack whose run folder this is. Raises ConfigError."""
    path = folder / "stack.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        endpoints = {str(name): str(where) for name, where in state["endpoints"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"--run-dir {str(folder)!r} holds no stack.json that `specbridge serve` wrote: {error}"
        ) from None
    sockets = {name: f"unix:{folder / name}.sock" for name in state.get("pids") or {}}
    return replace(of_endpoints(endpoints), target=sockets.get("target", ""), draft=sockets.get("draft", ""))


def of_endpoints(endpoints: Mapping[str, str]) -> Addresses:
    """endpoints: as serve announces them; they don't name the sockets of target and draft."""
    return Addresses(
        grpc=endpoints.get("grpc", ""),
        rest=endpoints.get("rest", "").removesuffix("/v1"),
        metrics={
            name.removesuffix(" metrics"): where
            for name, where in endpoints.items()
            if name.endswith(" metrics")
        },
    )


def running(grpc: str) -> Addresses | None:
    """The stack of this machine whose gateway listens at `grpc`; None if no run folder tells of it."""
    for folder in _run_folders():
        try:
            found = of_folder(folder)
        except ConfigError:
            continue
        if found.grpc == grpc:
            return found
    return None


def _run_folders() -> Iterator[Path]:
    for root in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        try:
            yield from sorted(Path(root).glob("specbridge-*"), reverse=True)
        except OSError:
            continue


def told(known: Addresses, **given: str) -> Addresses:
    """`known` with what the command line says: rest, target, draft, target_metrics and so on."""
    plain = {name: given[name] for name in ("rest", "target", "draft") if given.get(name)}
    metrics = dict(known.metrics or {})
    for service in ("gateway", "target", "draft"):
        if given.get(f"{service}_metrics"):
            metrics[service] = given[f"{service}_metrics"]
    found = replace(known, **plain, metrics=metrics)
    if found.rest and not found.metrics_of("gateway"):
        metrics["gateway"] = f"{found.rest}/metrics"
        found = replace(found, metrics=metrics)
    return found
