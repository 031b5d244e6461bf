"""See the package."""

from enum import Enum


class RequestOutputKind(Enum):
    DELTA = 1
    FINAL_ONLY = 2
