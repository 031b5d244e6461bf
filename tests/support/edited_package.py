"""A package of kvservice with edits in its source, in a process of its own.

Edits are written as a unified diff without the names and places of files: lines that go, that come and that stay, with
`@@` between two edits. The package must have the lines that go or stay once, whichever of its modules has them. As a
program this module imports the edited package and calls a check, which is named as in `crash_operations:operate`.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

Edit = tuple[str, str]
DETECTED = 3


def check_edited(package: str, diff: str, check: str) -> subprocess.CompletedProcess[str]:
    """Run a check on an edited package. The exit status is 0 if it passes, and DETECTED if it fails as it does when the
    package is wrong."""
    work = {"package": package, "edits": edits_in(package, diff), "check": check, "path": sys.path}
    command = [sys.executable, "-B", __file__]
    return subprocess.run(command, input=json.dumps(work), capture_output=True, text=True, check=False)


def edits_in(package: str, diff: str) -> list[Edit]:
    """Return the edits of a diff, which the package must have room for."""
    folder = importlib.import_module(package).__path__[0]
    sources = [path.read_text() for path in Path(folder).rglob("*.py")]
    edits = edits_of(diff)
    for old, _ in edits:
        count = sum(source.count(old) for source in sources)
        assert count == 1, f"{package} has these lines {count} times:\n{old}"
    return edits


def edits_of(diff: str) -> list[Edit]:
    """Return the edits of a diff as texts before and after."""
    edits: list[Edit] = []
    for hunk in diff.strip("\n").split("\n@@\n"):
        lines = hunk.split("\n")
        old, new = ("\n".join(line[1:] for line in lines if line[:1] in kept) for kept in ("- ", "+ "))
        edits += [(old, new)] if hunk else []
    return edits


class EditingLoader(SourceFileLoader):
    """Loads a module with these edits."""

    edits: Sequence[Edit] = ()

    def get_code(self, _: str) -> CodeType:
        source = self.get_data(self.path).decode()
        for old, new in self.edits:
            source = source.replace(old, new)
        code: CodeType = self.source_to_code(source, self.path)
        return code


class EditingFinder:
    """Finds the modules of a package, to be loaded with edits."""

    def __init__(self, package: str, edits: Sequence[Edit]) -> None:
        self._package, self._edits = package, edits

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != self._package and not name.startswith(f"{self._package}."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = EditingLoader(spec.loader.name, spec.loader.path)
            spec.loader.edits = self._edits
        return spec


def main() -> int:
    work = json.load(sys.stdin)
    sys.path[:] = work["path"]
    sys.meta_path.insert(0, EditingFinder(work["package"], work["edits"]))
    module, _, function = work["check"].partition(":")
    check = getattr(importlib.import_module(module), function)
    from kvservice.errors import KVServiceError

    try:
        check()
    except (AssertionError, KVServiceError, KeyError, ValueError) as error:
        print(type(error).__name__, error)
        return DETECTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
