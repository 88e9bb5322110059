"""The committed stubs are those of the committed .proto files, and every field says what it is."""

from __future__ import annotations

import re

import pytest

from protos import generate


def test_stubs_have_not_drifted() -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is in the dev extra: pip install -e '.[dev]'")
    assert generate.drifted() == [], "run `make protos` and commit the result"


def test_a_changed_stub_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is in the dev extra: pip install -e '.[dev]'")
    honest = generate.generate

    def tampered(out):  # type: ignore[no-untyped-def]
        paths = honest(out)
        with (out / paths[0]).open("a") as stub:
            stub.write("# changed\n")
        return paths

    monkeypatch.setattr(generate, "generate", tampered)
    assert len(generate.drifted()) == 1


ENTRY = re.compile(
    r"^(?:(?:repeated|optional)\s+)?(?:map<.*>|[\w.]+)\s+\w+\s*=\s*\d+;|^[A-Z_0-9]+\s*=\s*\d+;|^rpc\s"
)


def undocumented(text: str) -> list[str]:
    """Fields, enum values and calls without a comment behind or right above them."""
    found, above = [], ""
    for line in map(str.strip, text.splitlines()):
        if ENTRY.match(line) and "//" not in line and not above.startswith("//"):
            found.append(line)
        above = line
    return found


@pytest.mark.parametrize("name", generate.NAMES)
def test_every_field_has_a_comment(name: str) -> None:
    text = (generate.ROOT / "protos" / f"{name}.proto").read_text()
    assert sum(bool(ENTRY.match(line.strip())) for line in text.splitlines()) > 0
    assert undocumented(text) == []


def test_a_field_without_a_comment_is_noticed() -> None:
    text = """
        message Some {
          // says what it is
          repeated uint32 told = 1;
          map<uint32, float> silent = 2;
          optional float heard = 3;  // here
          OtherMessage also_silent = 4;
        }
    """
    assert undocumented(text) == ["map<uint32, float> silent = 2;", "OtherMessage also_silent = 4;"]
