"""Check the contract with buf, by proto/buf.yaml: its style, and that it still serves clients of the latest release.

`python proto/check.py`. Needs the `test` extra and git. The latest release is the highest tag v* in the history of
HEAD; without such a tag only the style is checked, and a line says so.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from generate import PROTO_ROOT, compile_protos

CONFIG = PROTO_ROOT / "buf.yaml"


def write_image(proto_root: Path, image: Path) -> Path:
    """Compile the contract to a file of descriptors, which has the imported files too. Returns its path."""
    options = ["--include_imports", "--include_source_info", f"--descriptor_set_out={image}"]
    compile_protos(options, proto_root)
    return image


def latest_release(repository: Path) -> str | None:
    """The highest tag v* in the history of HEAD, or None."""
    command = ["git", "tag", "--list", "v*", "--merged", "HEAD", "--sort=-version:refname"]
    tags = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout.split()
    return tags[0] if tags else None


def write_release(repository: Path, tag: str, directory: Path) -> Path:
    """Write the contract of a release below `directory`. Returns the root of its files."""
    archive = subprocess.run(["git", "archive", tag, "proto"], cwd=repository, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(directory, filter="data")
    return directory / "proto"


def buf(*arguments: str | Path) -> int:
    return subprocess.run(["buf", *arguments, "--config", CONFIG], check=False).returncode


def check() -> int:
    """Return 0 if buf has no complaint. Complaints are printed."""
    repository = PROTO_ROOT.parent
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        image = write_image(PROTO_ROOT, directory / "now.binpb")
        status = buf("lint", image)
        tag = latest_release(repository)
        if tag is None:
            print("buf: compatibility is not checked, because there is no release (a tag v*) in git's history")
            return status
        released = write_image(write_release(repository, tag, directory), directory / "released.binpb")
        return status or buf("breaking", image, "--against", released)


if __name__ == "__main__":
    sys.exit(check())
