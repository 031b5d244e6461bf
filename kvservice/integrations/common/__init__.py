"""Code that the connectors of inference engines share: options, identities, keys, an engine's blocks in the store."""
