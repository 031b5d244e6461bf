"""Regenerate kvservice/v1 from proto/kvservice/v1: `python proto/generate.py`. Needs the `test` extra."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

import google.rpc
from grpc_tools import protoc

PROTO_ROOT = Path(__file__).resolve().parent


def compile_protos(options: list[str], proto_root: Path = PROTO_ROOT) -> None:
    """Run protoc with `options` on the files of the contract below `proto_root`. Exits with its status if it fails."""
    includes = [proto_root, Path(str(files("grpc_tools"))) / "_proto", Path(next(iter(google.rpc.__path__))).parents[1]]
    protos = sorted(str(path) for path in proto_root.glob("kvservice/v1/*.proto"))
    status = protoc.main(["protoc", *(f"-I{path}" for path in includes), *options, *protos])
    if status != 0:
        raise SystemExit(status)


def generate(out_root: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` below `out_root`/kvservice/v1."""
    compile_protos([f"--{kind}_out={out_root}" for kind in ("python", "pyi", "grpc_python")])


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO_ROOT.parent)
