"""The command line: serve | target | draft | gateway | chat | explain | train | model | health | version.

Owns parsing, exit codes (0 fine, 1 failed, 2 a setting that can't work, 130 interrupted) and printing. Does
not own what the commands do. Services and torch are imported when a command needs them: --help stays fast.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence

from specbridge.errors import ConfigError, SpecBridgeError
from specbridge.logs import configure_logging
from specbridge.settings import default_environment, load


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return _guarded(lambda: COMMANDS[words[0]](words[1:]))
    parser = argparse.ArgumentParser(
        prog="specbridge", description="Lossless speculative decoding: target, draft and gateway services."
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, run in COMMANDS.items():
        commands.add_parser(name, help=(run.__doc__ or "").splitlines()[0])
    parser.add_argument("--version", action="version", version=f"specbridge {_version()}")
    parser.epilog = (
        "`specbridge COMMAND --help` shows a command's options. Those of serve, target, draft and gateway "
        "are also environment variables: --tree-budget is SPECBRIDGE_TREE_BUDGET; the option wins."
    )
    parser.parse_args(words or ["--help"])
    return 0


def main_target() -> int:
    return main(["target", *sys.argv[1:]])


def main_draft() -> int:
    return main(["draft", *sys.argv[1:]])


def main_gateway() -> int:
    return main(["gateway", *sys.argv[1:]])


def _guarded(run: Callable[[], int]) -> int:
    try:
        return run()
    except ConfigError as error:
        return _fail(error, 2)
    except SpecBridgeError as error:
        return _fail(error, int(getattr(error, "code", 1)))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`); closed, the interpreter does not complain at exit.
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return 1


def _fail(error: Exception, code: int) -> int:
    print(f"specbridge: error: {error}", file=sys.stderr)
    return code


def _service(name: str, argv: Sequence[str]) -> int:
    from specbridge import process

    default_environment(**process.rpc_environment())  # before gRPC is imported, as the next ones do
    from specbridge.flags import add_flags
    from specbridge.serve import settings_class

    kind = settings_class(name)
    parser = argparse.ArgumentParser(
        prog=f"specbridge {name}", allow_abbrev=False, description=(kind.__doc__ or "").strip()
    )
    add_flags(parser, kind)
    settings = load(kind, **vars(parser.parse_args(argv)))
    process.end_with_parent()
    # Before torch is imported: its OpenMP runtime reads these once, when it is loaded.
    threads = int(getattr(settings, "threads", 1))
    default_environment(**process.thread_environment(threads, int(getattr(settings, "tp", 1))))
    package = {"target": "target_service", "draft": "draft_service", "gateway": "gateway"}[name]
    with process.no_collections():
        server = importlib.import_module(f"{package}.server")
    return int(server.run(settings) or 0)


def _target(argv: Sequence[str]) -> int:
    """run the target service alone"""
    return _service("target", argv)


def _draft(argv: Sequence[str]) -> int:
    """run the draft service alone"""
    return _service("draft", argv)


def _gateway(argv: Sequence[str]) -> int:
    """run the gateway alone"""
    return _service("gateway", argv)


def _serve(argv: Sequence[str]) -> int:
    """run all three services on this machine, supervised"""
    import asyncio

    from specbridge.flags import add_flags
    from specbridge.serve import announcement, serve, serve_settings

    kind = serve_settings()
    parser = argparse.ArgumentParser(
        prog="specbridge serve",
        allow_abbrev=False,
        description="Run target, draft and gateway on this machine. An option goes to every service that "
        "has it; its --target-…, --draft-… or --gateway-… form to that one alone.",
    )
    add_flags(parser, kind)
    options = load(kind, **vars(parser.parse_args(argv)))
    configure_logging(str(getattr(options, "log_level", None) or "info"), "serve")
    # On a terminal the line that counts the seconds of waiting is wiped first.
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    asyncio.run(
        serve(options, announce=lambda made: print(start + announcement(made), file=sys.stderr, flush=True))
    )
    return 0


def _chat(argv: Sequence[str]) -> int:
    """ask a running gateway (or --local: a stack of its own), and see acceptance and speed"""
    from specbridge.chat import main as chat

    configure_logging("warning", "chat")
    return chat(argv)


def _train(argv: Sequence[str]) -> int:
    """make a drafter for a target: data, fit, eval"""
    from specbridge.train_cli import main as train

    return train(argv)


def _explain(argv: Sequence[str]) -> int:
    """measure what a round reads and costs, and what each part of the system gives"""
    from specbridge.explain.command import main as explain

    configure_logging("warning", "explain")
    return explain(argv)


def _model(argv: Sequence[str]) -> int:
    """fetch, convert, list or locate models"""
    from specbridge import models

    parser = argparse.ArgumentParser(prog="specbridge model", description="Models on this machine.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    what = "a local folder, a Hugging Face id, or a built-in name"
    fetch = actions.add_parser("fetch", help="make a model ready to serve: download or convert it")
    fetch.add_argument(
        "name", nargs="?", default=models.DEFAULT_TARGET, help=f"{what} (default: %(default)s)"
    )
    convert = actions.add_parser("convert", help="convert a built-in model into the cache")
    convert.add_argument(
        "name", nargs="?", default=models.DEFAULT_TARGET, help="built-in name (default: %(default)s)"
    )
    convert.add_argument("--force", action="store_true", help="even if it is there already")
    path = actions.add_parser(
        "path", help="print a model's folder; fails if it would have to be fetched first"
    )
    path.add_argument("name", nargs="?", default=models.DEFAULT_TARGET, help=f"{what} (default: %(default)s)")
    actions.add_parser("list", help="the built-in models and where they are")
    args = parser.parse_args(argv)
    configure_logging("warning", "model")
    if args.action == "list":
        for model in models.cached():
            print(f"{model.name}\t{'ready' if model.ready else 'not converted'}\t{model.folder}")
    elif args.action == "convert":
        print(models.convert_builtin(args.name, progress=sys.stderr.isatty(), force=args.force))
    elif args.action == "path":
        print(models.find(args.name))
    else:
        print(models.resolve_target(args.name, progress=sys.stderr.isatty()))
    return 0


def _health(argv: Sequence[str]) -> int:
    """ask a service whether it is serving; exit code 0 if so, else 1"""
    import asyncio

    from specbridge.clients import is_serving

    parser = argparse.ArgumentParser(prog="specbridge health", description="Ask a service for its health.")
    parser.add_argument("address", help="unix:/path or host:port")
    serving = asyncio.run(is_serving(parser.parse_args(argv).address))
    print("SERVING" if serving else "NOT_SERVING")
    return 0 if serving else 1


def _show_version(argv: Sequence[str]) -> int:
    """print the version"""
    argparse.ArgumentParser(prog="specbridge version", description="Print the version.").parse_args(argv)
    print(f"specbridge {_version()}")
    return 0


def _version() -> str:
    try:
        return importlib.metadata.version("specbridge")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": _serve,
    "target": _target,
    "draft": _draft,
    "gateway": _gateway,
    "chat": _chat,
    "explain": _explain,
    "train": _train,
    "model": _model,
    "health": _health,
    "version": _show_version,
}

if __name__ == "__main__":
    sys.exit(main())
