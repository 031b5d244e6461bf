"""A digest of a model's tensors that follows their changes.

Every byte goes into the digest, so it is the same in every process that loads the same weights. Each tensor is hashed
once, in about a second for 1.5 GB and processor, and again when it has changed. How that is known:

    optimizers, load_state_dict, copy_, add_ ...   version counters, which torch raises with every change in place
    `tensor.data = ...`, to()                      the address of the tensor's memory
    `tensor.data` changed in place, NumPy, fused   none of these raises a version: a sample of 64 elements of each
    optimizers that write through pointers         tensor, compared where the caller asks for a thorough look

Not noticed is a change of few elements that raises no version, such as `embedding.weight.data[token_id] = row`.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

_SAMPLE_SIZE = 64
# Samples are compared as integers: a NaN equals itself then.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN_CLASSES = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}

# Version, address and sample of a tensor.
_Look = tuple[int, int, bytes]

_version_of = operator.attrgetter("_version")


def can_digest(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its bytes, and they are here. Classes of quantization libraries keep scales
    elsewhere, sharded and offloaded tensors keep their bytes elsewhere."""
    plain = type(tensor) in _PLAIN_CLASSES and tensor.layout is torch.strided
    return plain and not (tensor.is_meta or tensor.is_quantized) and tensor.element_size() in _INTEGERS


class Weights:
    """The tensors of one model. Not for several threads at a time."""

    def __init__(self) -> None:
        # By id: the tensor, how it looked when it was hashed, and its digest.
        self._hashed: dict[int, tuple[torch.Tensor, _Look, bytes]] = {}
        self.track({})

    def track(self, tensors: dict[str, torch.Tensor]) -> None:
        """Goes over to other tensors, by name. All of them are such that `can_digest`."""
        self._names, self._tensors = list(tensors), list(tensors.values())
        # Tensors made in inference mode have no version.
        self._versioned = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._samplers = [_sampler(tensor) for tensor in self._tensors]
        groups = defaultdict(list)
        for sampler in self._samplers:
            groups[sampler.device, sampler.dtype].append(sampler)
        self._groups = list(groups.values())
        self._note()

    def _note(self) -> None:
        self._versions = list(map(_version_of, self._versioned))
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        self._samples = list(map(torch.cat, self._groups))

    def unchanged(self, thorough: bool) -> bool:
        """Whether the tensors are those of the latest digest, as far as is looked. Takes microseconds; with `thorough`,
        which compares samples, some hundred for some hundred tensors."""
        return (
            list(map(_version_of, self._versioned)) == self._versions
            and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
            and not (thorough and not all(map(torch.equal, map(torch.cat, self._groups), self._samples)))
        )

    def digest(self) -> bytes:
        """32 bytes: names, dtypes, shapes and values."""
        # Noted before anything is hashed, so that a change by another thread meanwhile is found the next time.
        self._note()
        looks = list(map(_look, self._tensors, self._samplers))
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


def _look(tensor: torch.Tensor, sampler: torch.Tensor) -> _Look:
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), sampler.cpu().numpy().tobytes()


def _sampler(tensor: torch.Tensor) -> torch.Tensor:
    """A view, of one dimension, of elements that are spread out over the tensor's memory."""
    if not tensor.numel():
        return tensor.detach().flatten().view(_INTEGERS[tensor.element_size()])
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    step = -(-span // _SAMPLE_SIZE)
    view = tensor.detach().as_strided((-(-span // step),), (step,), tensor.storage_offset())
    return view.view(_INTEGERS[tensor.element_size()])


def _hash_bytes(tensor: torch.Tensor) -> bytes:
    in_order = tensor.detach().cpu().contiguous().flatten()
    values: NDArray[np.uint8] = in_order.view(torch.uint8).numpy()
    return hashlib.sha256(values.data).digest()
