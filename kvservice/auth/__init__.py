"""Authentication: the identity of a caller, bearer tokens and TLS certificates.

tokens      the caller of the current RPC, bearer tokens, and the file with their hashes
token_file  changes of the token file              certificates  TLS certificates and keys
client      what a client presents, and whether an address is loopback
reloading   a value that is read again when its files change
"""

from kvservice.auth.certificates import CertificateFiles, Certificates
from kvservice.auth.client import ClientCredentials, TLSConfig, is_loopback
from kvservice.auth.reloading import Reloading, open_regular
from kvservice.auth.token_file import add as add_token
from kvservice.auth.token_file import remove as remove_token
from kvservice.auth.tokens import CALLER, UNNAMED, Identity, Tokens, new_token

__all__ = [
    "CALLER",
    "UNNAMED",
    "CertificateFiles",
    "Certificates",
    "ClientCredentials",
    "Identity",
    "Reloading",
    "TLSConfig",
    "Tokens",
    "add_token",
    "is_loopback",
    "new_token",
    "open_regular",
    "remove_token",
]
