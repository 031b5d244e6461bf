"""Conversion between protobuf messages and native values, for client and daemon."""
