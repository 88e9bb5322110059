"""Command lines of the project, as documentation and deployment files have them: do they parse?"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

from specbridge import cli, serve
from specbridge.flags import add_flags
from specbridge.settings import load

ROOT = Path(__file__).parents[2]
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


_PARSE_KNOWN = argparse.ArgumentParser.parse_known_args


class _ParsedError(BaseException):
    """The command is legal; what it would do is left undone."""


def check_specbridge(words: list[str]) -> None:
    """A `specbridge` command line: command, options and values are legal. Nothing is run.

    Raises AssertionError naming the words.
    """
    assert words[0] == "specbridge" and words[1:2], words
    name = words[1]
    assert name in cli.COMMANDS, f"there is no command {name!r}: {shlex.join(words)}"
    # These pass what they do not know on to a stack of their own.
    method = "parse_known_args" if name in ("chat", "explain") else "parse_args"
    parse = getattr(argparse.ArgumentParser, method)

    def parse_only(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        found = parse(parser, args, namespace)
        if name in ("chat", "explain"):
            known, rest = found
            assert known.local or not rest, f"{rest} without --local"
            _serve_settings(rest)
        elif name in serve.SERVICES:
            load(serve.settings_class(name), **vars(found))
        elif name == "serve":
            serve.split(load(serve.serve_settings(), **vars(found)))
        raise _ParsedError

    with mock.patch.object(argparse.ArgumentParser, method, parse_only):
        try:
            code: object = cli.main(words[1:])
        except _ParsedError:
            return
        except SystemExit as error:
            if error.code == 0 and words[-1] == "--help":
                return
            code = error.code
    raise AssertionError(f"{shlex.join(words)}: ended with {code} instead of being parsed")


def _serve_settings(words: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, serve.serve_settings())
    known, rest = _PARSE_KNOWN(parser, words)
    assert not rest, rest
    serve.split(load(serve.serve_settings(), **vars(known)))


def with_defaults(text: str) -> str:
    """`text` with each `${NAME:-default}` replaced by its default, as Compose does without the variables."""
    assert "$" not in VARIABLE.sub("", text), f"a variable without a default: {text}"
    return VARIABLE.sub(r"\2", text)


def in_documents(path: Path) -> list[str]:
    """Shell lines of a Markdown page: of fenced and indented blocks, continued lines joined, `$ ` cut off."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```(?:\w*)\n(.*?)^```", text, re.M | re.S)
    blocks += re.findall(r"^((?: {4}.*\n)+)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return [
        line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines() if line.strip()
    ]


def inline_in_documents(path: Path) -> list[str]:
    """What stands in single backticks, outside of blocks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [" ".join(found.split()) for found in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
