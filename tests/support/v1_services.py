"""The services of the contract, as the generated code describes them."""

from __future__ import annotations

import importlib
import pkgutil

import kvservice.v1

SERVICES = [
    service
    for module in pkgutil.iter_modules(kvservice.v1.__path__)
    if module.name.endswith("_pb2")
    for service in importlib.import_module(f"kvservice.v1.{module.name}").DESCRIPTOR.services_by_name.values()
]
