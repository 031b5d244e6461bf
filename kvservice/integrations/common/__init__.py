"""What the connectors of inference engines share: options, identities, keys, and an engine's blocks in the store."""
