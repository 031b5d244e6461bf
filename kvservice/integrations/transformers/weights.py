"""A digest of a model's tensors that tracks their changes.

The digest covers every byte, so it is the same in every process that loads the same weights. Each tensor is hashed
once, at about 1.5 GB per second and CPU, and again after a change. Changes are detected as follows:

    optimizers, load_state_dict, copy_, add_ ...   version counters, which torch increments with every in-place change
    `tensor.data = ...`, to()                      the address of the tensor's memory
    in-place changes of `tensor.data`, NumPy,      these do not increment the version; checksums of every byte are
    fused optimizers that write through pointers   compared if the caller requests a thorough check

A thorough check reads every weight twice. It takes about as long as computing one token, which also reads every weight.
"""

from __future__ import annotations

import hashlib
import operator
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from kvservice.integrations.transformers.checksums import Checksums, equal

_PLAIN_CLASSES = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}

# Version, address and checksum of a tensor.
_Look = tuple[int, int, bytes]

_version_of = operator.attrgetter("_version")


def can_digest(tensor: torch.Tensor) -> bool:
    """Return whether the local bytes of a tensor are its complete value. Tensor classes of quantization libraries keep
    scales elsewhere; sharded and offloaded tensors keep their bytes elsewhere."""
    plain = type(tensor) in _PLAIN_CLASSES and tensor.layout is torch.strided
    return plain and not (tensor.is_meta or tensor.is_quantized)


class Weights:
    """The tensors of one model. Not thread-safe."""

    def __init__(self) -> None:
        # Tensors by id, with version, address and checksum at the time of hashing, and with their digest.
        self._hashed: dict[int, tuple[torch.Tensor, _Look, bytes]] = {}
        self.track({})

    def track(self, tensors: dict[str, torch.Tensor]) -> None:
        """Track other tensors, by name. `can_digest` must be true for all of them."""
        self._names, self._tensors = list(tensors), list(tensors.values())
        # Tensors made in inference mode have no version.
        self._versioned = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._checksums = Checksums([])
        self._sums: list[torch.Tensor] = []

    def _note(self) -> None:
        self._versions = list(map(_version_of, self._versioned))
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        self._checksums = Checksums(self._tensors)
        self._sums = self._checksums.compute()

    def unchanged(self, thorough: bool) -> bool:
        """Return whether the tensors have not changed since the latest digest. Without `thorough` it takes microseconds
        and misses some changes; with it, it compares checksums and takes about as long as computing one token."""
        return (
            list(map(_version_of, self._versioned)) == self._versions
            and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
            and not (thorough and not equal(self._checksums.compute(), self._sums))
        )

    def digest(self) -> bytes:
        """Return 32 bytes that cover names, dtypes, shapes and values."""
        # The state is recorded before hashing, so that the next check detects a concurrent change by another thread.
        self._note()
        looks = list(map(_look, self._tensors, self._sums))
        digests = {
            id(tensor): self._hashed[id(tensor)][2]
            for tensor, look in zip(self._tensors, looks, strict=True)
            if id(tensor) in self._hashed and self._hashed[id(tensor)][1] == look
        }
        missing = [tensor for tensor in self._tensors if id(tensor) not in digests]
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
            digests.update(zip(map(id, missing), threads.map(_hash_bytes, missing), strict=True))
        self._hashed = {
            id(tensor): (tensor, look, digests[id(tensor)]) for tensor, look in zip(self._tensors, looks, strict=True)
        }
        total = hashlib.sha256()
        for name, tensor in zip(self._names, self._tensors, strict=True):
            total.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode() + digests[id(tensor)])
        return total.digest()


def _look(tensor: torch.Tensor, sums: torch.Tensor) -> _Look:
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), sums.cpu().numpy().tobytes()


def _hash_bytes(tensor: torch.Tensor) -> bytes:
    in_order = tensor.detach().cpu().contiguous().flatten()
    values: NDArray[np.uint8] = in_order.view(torch.uint8).numpy()
    return hashlib.sha256(values.data).digest()
