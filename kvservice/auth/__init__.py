"""Authentication: the identity of a caller, bearer tokens and TLS certificates.

tokens        the caller of the current RPC, bearer tokens, the file with their hashes, and its changes
certificates  TLS certificates and keys
client        what a client presents, and whether an address is loopback
reloading     a value that is read again when its files change
"""

from kvservice.auth.certificates import CertificateFiles, Certificates
from kvservice.auth.client import ClientCredentials, TLSConfig, is_loopback
from kvservice.auth.reloading import NUM_LOOKS, Reloading, open_regular
from kvservice.auth.tokens import CALLER, UNNAMED, Identity, Tokens, add_token, new_token, remove_token

__all__ = [
    "CALLER",
    "NUM_LOOKS",
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
