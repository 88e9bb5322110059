"""Regenerates the committed stubs from the .proto files; `--check` fails if they have drifted.

Run from anywhere: `python -m protos.generate [--check]`. Needs grpcio-tools of the version pinned
in constraints.txt, since stubs refuse a grpcio runtime older than the generator.
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("common", "target", "draft", "gateway")


def generate(out: Path) -> list[Path]:
    """Write the stubs of all protos below `out`/protos and return their paths relative to `out`."""
    from grpc_tools import protoc

    for name in NAMES:
        # common.proto has no service: a grpc stub of it would be an empty module.
        grpc_out = [] if name == "common" else [f"--grpc_python_out={out}"]
        code = protoc.main(
            [
                "protoc",
                f"-I{ROOT}",
                f"--python_out={out}",
                f"--pyi_out={out}",
                *grpc_out,
                f"protos/{name}.proto",
            ]
        )
        if code:
            raise SystemExit(f"protoc failed on protos/{name}.proto with exit code {code}")
    return sorted(path.relative_to(out) for path in (out / "protos").glob("*_pb2*.py*"))


def drifted() -> list[str]:
    """Names of committed stubs that differ from what the protos generate now."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        return [
            str(path)
            for path in generate(out)
            if not (ROOT / path).exists() or not filecmp.cmp(out / path, ROOT / path, shallow=False)
        ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on drift")
    args = parser.parse_args(argv)
    if not args.check:
        generate(ROOT)
        return 0
    stale = drifted()
    for name in stale:
        print(f"{name} is stale: run `make protos` and commit the result", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
