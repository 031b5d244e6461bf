"""Authentication: the identity of a caller, bearer tokens and TLS certificates.

identity    the caller of the current RPC          tokens        bearer tokens, and the file with their hashes
addresses   whether an address is loopback         certificates  TLS certificates and keys
reloading   a value that is read again when its files change
"""

from kvservice.auth.addresses import is_loopback
from kvservice.auth.certificates import CertificateFiles, Certificates
from kvservice.auth.identity import CALLER, UNNAMED, Identity
from kvservice.auth.reloading import Reloading
from kvservice.auth.tokens import Tokens

__all__ = ["CALLER", "UNNAMED", "CertificateFiles", "Certificates", "Identity", "Reloading", "Tokens", "is_loopback"]
