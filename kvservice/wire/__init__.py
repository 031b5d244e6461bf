"""Protobuf messages to native values and back, for both ends of the wire."""
