"""Who a caller is, and what the daemon and its clients need to know each other by.

identity    the caller of the RPC under way       tokens        bearer tokens, and the file that names their hashes
addresses   whether other hosts reach an address  certificates  TLS certificates and keys
reloading   a value read again when its files change
"""

from kvservice.auth.addresses import is_loopback
from kvservice.auth.certificates import CertificateFiles, Certificates
from kvservice.auth.identity import CALLER, UNNAMED, Identity
from kvservice.auth.reloading import Reloading
from kvservice.auth.tokens import Tokens

__all__ = ["CALLER", "UNNAMED", "CertificateFiles", "Certificates", "Identity", "Reloading", "Tokens", "is_loopback"]
