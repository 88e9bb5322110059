"""What README and docs tell people to type exists: commands, options, make targets, files, variables."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import compose_files
import pytest
from command_lines import ROOT, check_specbridge, in_documents, inline_in_documents

from specbridge import cli, serve
from specbridge.models import CacheSettings
from specbridge.process import SupervisedSettings

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text()


def specbridge_words(line: str) -> list[str] | None:
    """The `specbridge ...` part of a shell line, be it behind torchrun, variables or a systemd key."""
    found = re.search(r"(?:^|[ =/])(specbridge [a-z].*)", line)
    if found is None or re.match(r"#|pip |apt|docker |cd |install ", line):
        return None
    words = shlex.split(found[1], comments=True)
    for end in ("|", "&", "&&", ";", ">"):
        words = words[: words.index(end)] if end in words else words
    return words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    for line in in_documents(page):
        words = specbridge_words(line)
        if words is not None:
            check_specbridge(words)
    for text in inline_in_documents(page):
        if re.match(r"specbridge [a-z]", text) and not re.search(r"[|…]|\.\.\.|[A-Z]{3}", text):
            words = shlex.split(text)
            assert words[1] in cli.COMMANDS, f"{page.name}: {text}"
            if "--" in text:
                check_specbridge(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_files_and_make_targets_exist(page: Path) -> None:
    lines = [*in_documents(page), *inline_in_documents(page)]
    for line in lines:
        for module in re.findall(r"python3? -m ((?:benchmarks|specbridge|protos)[\w.]*)", line):
            assert importlib.util.find_spec(module) is not None, f"{page.name}: {line}"
        for target in re.findall(r"(?:^|&& )make (?:PYTHON=\S+ )?([a-z]+)", line):
            assert re.search(rf"^{target}:", MAKEFILE, re.M), f"{page.name}: make {target}"
        for path in re.findall(r"(?<![\w./~-])((?:deploy|benchmarks|tests|docs)/[\w./-]*\w)", line):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
    for path in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text()):
        assert (page.parent / path).exists(), f"{page.name} links to {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_compose_commands_name_profiles_and_services(page: Path) -> None:
    for line in [*in_documents(page), *inline_in_documents(page)]:
        found = re.search(r"docker compose ((?:--profile \w+ )*)(?:up|build|logs|restart)\b([^#]*)", line)
        if found:
            profiles = found[1].replace("--profile", "").split()
            known = {name for profile in profiles for name in compose_files.services(profile)}
            assert known, f"{page.name}: {line}: no profile, or one without services"
            named = {word for word in found[2].split() if not word.startswith("-")}
            assert named <= known, f"{page.name}: {line}"


def test_variables_exist() -> None:
    kinds = [
        serve.serve_settings(),
        CacheSettings,
        SupervisedSettings,
        *map(serve.settings_class, serve.SERVICES),
    ]
    known = {f"SPECBRIDGE_{name.upper()}" for kind in kinds for name in kind.model_fields}
    known |= set(re.findall(r"\$\{(SPECBRIDGE_\w+)", (ROOT / "docker-compose.yml").read_text()))
    for page in PAGES:
        named = set(re.findall(r"\bSPECBRIDGE_[A-Z_]*[A-Z]\b", page.read_text()))
        assert named <= known, f"{page.name}: {sorted(named - known)}"


@pytest.mark.parametrize(
    "block",
    [
        "    torchrun --nnodes 2 --no-python \\\n      specbridge target --listne x  # why\n",
        "```\n$ specbridge serve --tree-budget five\n```\n",
        "    SPECBRIDGE_TP=2 specbridge model\n",
        "    specbridge chat --tp 2\n",
        "    ExecStart=/opt/specbridge/bin/specbridge starve\n",
    ],
)
def test_a_wrong_command_would_be_found(tmp_path: Path, block: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Run:\n\n{block}\nand `specbridge serve`.\n")
    [line] = in_documents(page)
    words = specbridge_words(line)
    assert words is not None
    with pytest.raises(AssertionError):
        check_specbridge(words)
