"""`kvservice top`: a terminal view of the pool."""

from kvservice.environment import prepare_grpc

prepare_grpc()

from kvservice.top.columns import SORT_KEYS  # noqa: E402  the environment must be set first
from kvservice.top.run import TopOptions, run  # noqa: E402
from kvservice.top.source import Source  # noqa: E402

__all__ = ["SORT_KEYS", "Source", "TopOptions", "run"]
