"""The pool for a terminal: `kvservice top`."""

from kvservice.environment import prepare_grpc

prepare_grpc()

from kvservice.top.columns import SORT_KEYS  # noqa: E402  the environment comes first
from kvservice.top.run import Options, run  # noqa: E402

__all__ = ["SORT_KEYS", "Options", "run"]
