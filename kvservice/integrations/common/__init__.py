"""Code that the connectors of inference engines share: options, identities, keys, an engine's blocks in the store."""

from kvservice.integrations.common.blocks import EngineBlocks
from kvservice.integrations.common.keys import digest_key, hexadecimal_key
from kvservice.integrations.common.options import ConnectorOptions

__all__ = ["ConnectorOptions", "EngineBlocks", "digest_key", "hexadecimal_key"]
