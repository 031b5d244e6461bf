"""The error of a file with a session that cannot be used."""

from __future__ import annotations


class DamagedFileError(Exception):
    """A file is not whole, or its bytes are not the ones that were written. The message says what is wrong with it."""
