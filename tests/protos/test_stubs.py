"""The committed stubs are those of the committed .proto files."""

from __future__ import annotations

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
