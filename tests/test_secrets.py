"""The repr of an object with a secret does not show it, because it ends in logs and in the texts of errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import kvservice
from kvservice.auth import Certificates
from kvservice.config import ServeConfig
from kvservice.saved import SessionValues

SECRET = "secret-in-sixteen-bytes"
_NAMES = re.compile(r"(.*_)?(token|secret|credential|password)")
_KINDS = re.compile(r"\b(str|bytes)\b")
# Not secrets: the text of a token of a model.
_OTHERS = {"decoded_token"}


def _shown(tree: ast.Module) -> Iterator[str]:
    """Yield the fields of dataclasses and of models that are named as secrets, and shown."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        makers = [ast.unparse(one) for one in (*node.decorator_list, *node.bases)]
        if not any(maker.startswith(("dataclass", "BaseModel", "NamedTuple")) for maker in makers):
            continue
        for field in node.body:
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            name, value = field.target.id, field.value
            is_secret = _NAMES.fullmatch(name) and _KINDS.search(ast.unparse(field.annotation))
            if not is_secret or name in _OTHERS:
                continue
            if not (isinstance(value, ast.Call) and any(ast.unparse(one) == "repr=False" for one in value.keywords)):
                yield f"{node.name}.{name}"


def test_fields_that_are_named_as_secrets_are_not_shown() -> None:
    root = Path(kvservice.__file__).parent
    files = sorted(root.rglob("*.py"))
    assert len(files) > 100
    assert [(file.name, *found) for file in files if (found := list(_shown(ast.parse(file.read_text()))))] == []


def test_the_rule_sees_what_it_forbids() -> None:
    source = """
@dataclass(frozen=True)
class Link:
    token: bytes
    auth_token: str = field(default="")
    credential: bytes | None = field(default=None, repr=False)
    num_tokens: int = 0
    token_ids: bytes = b""

class Options(BaseModel):
    http_token: str = Field("")
"""
    assert list(_shown(ast.parse(source))) == ["Link.token", "Link.auth_token", "Options.http_token"]


def test_what_holds_secrets_does_not_show_them() -> None:
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_size": 32, "num_blocks": 8}
    for one in (
        ServeConfig(http_token=SECRET, metrics_token=SECRET, **shape),
        Certificates(b"", SECRET.encode()),
        SessionValues("", "", "", SECRET, 0.0),
    ):
        assert type(one).__name__ in repr(one)
        assert SECRET not in repr(one)
