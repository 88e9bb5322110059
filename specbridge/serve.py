"""What `specbridge serve` does: its options, which service gets which, and running the stack.

Owns: the options of the whole stack, combinations of options of different services that can't work, and the
announcement of addresses. Does not own: processes (specbridge.stack), one service's options (its config).

Every option of a service is an option of `serve` and goes to all services that have it; its `--target-…`,
`--draft-…` and `--gateway-…` forms set it for one. Services are named, never imported: their config modules
are light, and loaded by name so that the command line does not depend on them.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import Field, create_model
from pydantic_settings import SettingsConfigDict

from specbridge import fixed_rows, models, room, stack
from specbridge.acceptance_model import label as acceptance_label
from specbridge.clients import Joined, wait_attached, wait_drafting
from specbridge.errors import ConfigError
from specbridge.flags import arguments, flag, is_switch, metavar
from specbridge.server import first_of, until_signal
from specbridge.settings import ENV_PREFIX, Settings, load

log = logging.getLogger(__name__)

SERVICES = {
    "target": ("target_service.config", "TargetSettings"),
    "draft": ("draft_service.config", "DraftSettings"),
    "gateway": ("gateway.config", "GatewaySettings"),
}
# Set by the supervisor itself.
_WIRED = frozenset(
    {
        *("listen", "grpc_listen", "target_address", "draft_address", "metrics_port"),
        *("launcher", "rank_interface"),
    }
)
# The same word with another meaning: the gateway's is the stack's, the others have the prefixed form only.
_OWN_MEANING = {"max_verify_rows": "gateway", "drain": "gateway"}


class StackSettings(Settings):
    """The options of the stack itself."""

    # The services' options are texts here, parsed by their own classes; code may give numbers.
    model_config = SettingsConfigDict(coerce_numbers_to_str=True)

    target: str = models.DEFAULT_TARGET
    """The target model: a local folder, a Hugging Face id, or the built-in `smollm2-135m`."""
    draft: str = models.AUTO
    """Its drafter: a folder or a Hugging Face id; `auto`: the one that comes with the built-in model."""
    no_draft: bool = False
    """Serve without speculation; no draft service is started."""
    grpc_host: str = "127.0.0.1"
    """Host that the gRPC Generation service listens on."""
    grpc_port: int = Field(default=50050, ge=0, le=65535)
    """Port of the gRPC Generation service; 0 picks a free one."""
    run_dir: str = ""
    """Folder for sockets and stack.json (addresses, process ids); empty: a private temporary one."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Seconds that the services get to load, measure and become ready."""
    hang_timeout: float = Field(default=60.0, ge=0)
    """Seconds without an answer to health checks after which a service is killed and restarted; 0: never."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts in a row, without a calm half minute between, after which the stack gives up."""


@cache
def settings_class(service: str) -> type[Settings]:
    module, name = SERVICES[service]
    found: type[Settings] = getattr(importlib.import_module(module), name)
    return found


@cache
def serve_settings() -> type[StackSettings]:
    """StackSettings plus, as texts that may be absent, the options of the services in both forms."""
    fields: dict[str, Any] = {}
    for service in SERVICES:
        for name, field in settings_class(service).model_fields.items():
            if (
                name not in StackSettings.model_fields
                and name not in _WIRED
                and (_owner(name) in (None, service))
            ):
                # Environment variables of the plain form are read, and judged, by the service's own class.
                annotation = bool if is_switch(field) else str
                shown = Field(
                    default=None,
                    description=_describe(field.description, field.default),
                    json_schema_extra={"metavar": metavar(field.annotation)},
                )
                fields.setdefault(name, (annotation | None, shown))
    for service in SERVICES:
        for name in settings_class(service).model_fields:
            prefixed = f"{service}_{name}"
            shared = sum(name in settings_class(other).model_fields for other in SERVICES) > 1
            wired = name in _WIRED and name != "metrics_port"
            if shared and not wired and name not in ("target", "draft") and prefixed not in _WIRED:
                text = f"{flag(name)} of the {service} service alone."
                fields[prefixed] = (str | None, Field(default=None, description=text))
    return create_model("ServeSettings", __base__=StackSettings, **fields)


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be started. endpoints: name -> address for people."""

    services: tuple[stack.Service, ...]
    limits: stack.Limits
    endpoints: Mapping[str, str]
    options: StackSettings
    model: str
    """What is served, for people."""
    synthetic: tuple[str, ...] = ()
    """What of it is not real, a sentence each."""


def plan(options: StackSettings, folder: Path) -> Plan:
    """Turn options into services. Raises ConfigError for a wrong option or a combination that can't work."""
    own = split(options)
    names = [name for name in SERVICES if name != "draft" or not options.no_draft]
    http_host, http_port = str(own["gateway"].http_host), int(own["gateway"].http_port)  # type: ignore[attr-defined]
    http_port = http_port or stack.free_port(http_host)
    grpc_port = options.grpc_port or stack.free_port(options.grpc_host)
    address = {name: f"unix:{folder / name}.sock" for name in names}
    address["gateway"] = f"{options.grpc_host}:{grpc_port}"
    wiring: dict[str, dict[str, Any]] = {
        "target": {"listen": address["target"], "launcher": "none"},
        "draft": {
            "listen": address.get("draft"),
            "target_address": address["target"],
            "draft": options.draft,
        },
        "gateway": {
            "target_address": address["target"],
            "draft_address": address.get("draft", ""),
            "grpc_listen": address["gateway"],
            "http_port": http_port,
        },
    }
    endpoints = {
        "rest": f"http://{_shown(http_host)}:{http_port}/v1",
        "grpc": f"{_shown(options.grpc_host)}:{grpc_port}",
    }
    endpoints["gateway metrics"] = f"http://{_shown(http_host)}:{http_port}/metrics"
    if not options.no_draft and "gpu_reserve" not in own["target"].model_fields_set:
        wiring["target"]["gpu_reserve"] = room.reserve_for_draft(
            own["draft"].model_dump() | {"draft": options.draft, "target": options.target},
            own["target"].model_dump(),
        )
    target = _dummy_config(own["target"]) or options.target
    wiring["gateway"] |= fixed_rows.defaults(own["target"], own["gateway"])
    services = []
    for name in names:
        values = {key: getattr(own[name], key) for key in own[name].model_fields_set} | wiring[name]
        values["target"] = target
        if name == "gateway" and target != options.target:
            values |= _stand_ins(Path(target), values)
        if name != "gateway":
            port = values.get("metrics_port") or stack.free_port()
            values["metrics_port"] = port
            if port > 0:
                endpoints[f"{name} metrics"] = f"http://{_shown(str(own[name].metrics_host))}:{port}/metrics"  # type: ignore[attr-defined]
        services.append(_service(name, values, address[name], own[name]))
    limits = stack.Limits(
        start_timeout=options.start_timeout,
        hang_timeout=options.hang_timeout,
        max_restarts=options.max_restarts,
    )
    return Plan(tuple(services), limits, endpoints, options, target, _synthetic(own, names))


def split(options: StackSettings) -> dict[str, Settings]:
    """Each service's own settings out of the stack's. Raises ConfigError."""
    given = {
        name: getattr(options, name)
        for name in options.model_fields_set
        if getattr(options, name) is not None
    }
    own = {}
    for service in SERVICES:
        kind = settings_class(service)
        values = {
            name: given[name]
            for name in kind.model_fields
            if name in given and name not in _WIRED and _owner(name) in (None, service)
        }
        for name in kind.model_fields:
            if f"{service}_{name}" in given:
                values[name] = given[f"{service}_{name}"]
            elif name in _WIRED or _owner(name) not in (None, service):
                # Not from the environment: there the word means another service's option.
                values[name] = kind.model_fields[name].get_default(call_default_factory=True)
        own[service] = load(kind, **values)
    _check(options, own, given)
    return own


def _check(options: StackSettings, own: Mapping[str, Settings], given: Mapping[str, Any]) -> None:
    """Combinations across services; those of one service are its own class's matter."""
    if options.no_draft:
        prefixed = (f"draft_{name}" for name in type(own["draft"]).model_fields)
        alone = {"draft", "drafter_config", *prefixed} - set(type(own["gateway"]).model_fields)
        wrong = sorted(alone & set(given))
        if wrong:
            raise ConfigError(f"--no-draft and {flag(wrong[0])} exclude each other; drop one of them")
    target = own["target"].model_dump()
    gateway = own["gateway"].model_dump() | fixed_rows.defaults(own["target"], own["gateway"])
    theirs, ours = target["simulate_acceptance"], own["draft"].model_dump()["simulate_acceptance"]
    if not options.no_draft and acceptance_label(theirs) != acceptance_label(ours):
        raise ConfigError(
            f"the target simulates acceptance {theirs or 'nothing'!r}, the draft {ours or 'nothing'!r}: no "
            "draft token would ever be right; give both the same with --simulate-acceptance"
        )
    budget, most = gateway["tree_budget"], target["max_tree_nodes"]
    if not options.no_draft and budget > most:
        raise ConfigError(
            f"--tree-budget {budget} is above --max-tree-nodes {most}, the largest tree the target takes; "
            "raise the one or lower the other"
        )
    if not options.no_draft and budget and gateway["min_tree"] > budget:
        raise ConfigError(
            f"--min-tree {gateway['min_tree']} is above --tree-budget {budget}: no tree would ever be used; "
            "lower it, or serve with --no-draft"
        )
    if gateway["max_running"] > target["max_sessions"]:
        raise ConfigError(
            f"--max-running {gateway['max_running']} is above --max-sessions {target['max_sessions']} of the "
            "target; raise the one or lower the other"
        )
    if (
        options.grpc_port
        and options.grpc_port == gateway["http_port"]
        and options.grpc_host == gateway["http_host"]
    ):
        raise ConfigError(
            f"--http-port and --grpc-port are both {options.grpc_port}; give them different ports"
        )


def _dummy_config(target: Settings) -> str:
    """The configuration that stands for the target if it has no weights, else empty. Raises ConfigError."""
    values = target.model_dump()
    if values["load_format"] != "dummy":
        return ""
    given = values["config"] or values["target"]
    return str(models.resolve_config(given, "--config" if values["config"] else "--target"))


def _stand_ins(place: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """A name, and a tokenizer where there is none, for the gateway before a model without weights."""
    folder = place.parent if place.is_file() else place
    chosen = {"model_name": given.get("model_name") or models.config_name(place)}
    if not given.get("tokenizer") and not (folder / "tokenizer.json").is_file():
        chosen["tokenizer"] = "bytes"
    return chosen


def _synthetic(own: Mapping[str, Settings], names: list[str]) -> tuple[str, ...]:
    lines = []
    for name in names:
        values = own[name].model_dump()
        if values.get("load_format") == "dummy":
            lines.append(f"  DUMMY WEIGHTS in the {name} service: times are real, the text means nothing")
        if values.get("simulate_acceptance"):
            setting = values["simulate_acceptance"]
            lines.append(f"  SIMULATED ACCEPTANCE in the {name} service: {setting}; the text is made up")
    return tuple(lines)


def _fetch(options: StackSettings, *, progress: bool) -> None:
    """Get real models onto this machine before the services start, with one progress bar. Raises ConfigError
    for options that can't work, before anything is fetched."""
    own = split(options)
    target, draft = options.target, options.draft
    if own["target"].model_dump()["load_format"] != "dummy":
        models.resolve_target(target, progress=progress)
    if not options.no_draft and own["draft"].model_dump()["load_format"] != "dummy":
        models.resolve_draft(draft, target, progress=progress)


def _service(name: str, values: dict[str, Any], address: str, own: Settings) -> stack.Service:
    # Secrets go by environment: a command line is shown to every user of the machine.
    secret = {key for key, field in type(own).model_fields.items() if not field.repr}
    flags = arguments({key: value for key, value in values.items() if key not in secret})
    env = {ENV_PREFIX + key.upper(): str(values[key]) for key in secret if key in values}
    if _from_hub(values["target"]) or _from_hub(str(values.get("draft", models.AUTO))):
        env["HF_HUB_OFFLINE"] = "1"  # the supervisor has fetched it: the services look in the cache only
    wanted = int(getattr(own, "threads", 1))  # the gateway computes nothing: one thread
    ranks = int(getattr(own, "tp", 1))
    environment = stack.service_environment(wanted, ranks, _option_variables(), **env)
    follows, joined = _partner(name, values)
    return stack.Service(
        name,
        stack.service_command(name, flags),
        address,
        environment,
        follows=follows,
        joined=joined,
        mirrors_others=name == "gateway",
    )


def _partner(name: str, values: Mapping[str, Any]) -> tuple[str, Joined | None]:
    """Whom a service must have met for requests to be drafted for, and how to wait for that."""
    if name == "draft":
        return "target", wait_attached
    if name == "gateway" and values["draft_address"]:
        return "draft", wait_drafting
    return "", None


def _from_hub(name: str) -> bool:
    return name not in models.BUILTIN and name != models.AUTO and not Path(name).expanduser().is_dir()


def _option_variables() -> frozenset[str]:
    """Environment variables that `serve` has read itself; a service must not read them a second time."""
    fields = {*serve_settings().model_fields, *(n for s in SERVICES for n in settings_class(s).model_fields)}
    return frozenset(ENV_PREFIX + name.upper() for name in fields)


def _owner(name: str) -> str | None:
    return _OWN_MEANING.get(name)


def _describe(text: str | None, default: Any) -> str:
    shown = (
        ""
        if default in (None, "")
        else f" (default: {('off', 'on')[default] if isinstance(default, bool) else default})"
    )
    return (text or "") + shown


def _shown(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


async def serve(
    options: StackSettings,
    *,
    announce: Callable[[Plan], None] | None = None,
    work: Callable[[Plan], Awaitable[None]] | None = None,
    write: Callable[[str], None] | None = None,
    progress: bool = True,
) -> None:
    """Run the whole stack until SIGINT or SIGTERM, or until `work` is done.

    announce: called once everything is SERVING. write: takes the services' log lines (default: stderr).
    Raises ConfigError before anything starts if the options can't work, ServiceFailed if a service can't run.
    """
    async with stack.run_folder(options.run_dir) as folder:
        _fetch(options, progress=progress)
        made = plan(options, folder)
        state = partial(stack.write_state, folder / "stack.json", endpoints=made.endpoints)
        running = stack.Stack(
            made.services, made.limits, write=write, on_change=lambda changed: state(changed)
        )

        async def body() -> None:
            await running.start(_waiting if progress else None)
            if announce:
                announce(made)
            await first_of(running.wait(), *([work(made)] if work else []))

        try:
            await until_signal(body())
        finally:
            await running.stop()


def announcement(made: Plan) -> str:
    """The lines that tell a person where everything is."""
    lines = [f"SpecBridge serves {made.model}", *made.synthetic]
    lines += [f"  {name:<16} {where}" for name, where in made.endpoints.items()]
    return "\n".join(lines)


def _waiting(missing: str, seconds: float) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[Kwaiting for {missing} ({seconds:.0f} s)")
        sys.stderr.flush()
    elif int(seconds) % 10 == 0:
        log.info("waiting for %s (%.0f s)", missing, seconds)
