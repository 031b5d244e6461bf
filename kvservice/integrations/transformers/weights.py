"""A digest of a model's tensors that follows their changes.

Every byte goes into the digest, so it is the same in every process that loads the same weights. Each tensor is hashed
once, and again when it has changed. How that is known:

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

_version_of = operator.attrgetter("_version")


def can_digest(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its bytes, and they are here. Classes of quantization libraries keep scales
    elsewhere, sharded and offloaded tensors keep their bytes elsewhere."""
    plain = type(tensor) in _PLAIN_CLASSES and tensor.layout is torch.strided
    return plain and not (tensor.is_meta or tensor.is_quantized) and tensor.element_size() in _INTEGERS


class Weights:
    """The tensors of one model. Raising a version, hashing and comparing must not overlap: the caller holds a lock."""

    def __init__(self) -> None:
        self._hashed: dict[int, tuple[torch.Tensor, tuple[int, int], bytes]] = {}
        self._samplers: list[list[torch.Tensor]] = []
        self._samples: list[torch.Tensor] = []
        self.track({})

    def track(self, tensors: dict[str, torch.Tensor]) -> None:
        """Goes over to other tensors, by name. All of them are such that `can_digest`."""
        self._forget_sampled_changes()
        self._names, self._tensors = list(tensors), list(tensors.values())
        # Tensors made in inference mode have no version.
        self._versioned = [tensor for tensor in self._tensors if not tensor.is_inference()]
        samplers = defaultdict(list)
        for tensor in self._tensors:
            if tensor.numel():
                samplers[tensor.device, tensor.element_size()].append(_sampler(tensor))
        self._samplers = list(samplers.values())
        self._note()

    def unchanged(self, thorough: bool) -> bool:
        """Whether the tensors are those of the latest digest, as far as is looked. Takes microseconds; with `thorough`,
        which compares samples, some hundred for some hundred tensors."""
        return (
            list(map(_version_of, self._versioned)) == self._versions
            and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
            and not (thorough and self._sampled_change())
        )

    def digest(self) -> bytes:
        """32 bytes: names, dtypes, shapes and values."""
        self._forget_sampled_changes()
        # Noted before anything is hashed, so that a change by another thread meanwhile is found the next time.
        self._note()
        stamps = [_stamp(tensor) for tensor in self._tensors]
        known = {id(tensor): digest for tensor, stamp, digest in self._hashed.values() if stamp == _stamp(tensor)}
        missing = [tensor for tensor in self._tensors if id(tensor) not in known]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
            known.update(zip(map(id, missing), threads.map(_hash_bytes, missing), strict=True))
        self._hashed = {
            id(tensor): (tensor, stamp, known[id(tensor)]) for tensor, stamp in zip(self._tensors, stamps, strict=True)
        }
        total = hashlib.sha256()
        for name, tensor in zip(self._names, self._tensors, strict=True):
            total.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode() + known[id(tensor)])
        return total.digest()

    def _note(self) -> None:
        self._versions = list(map(_version_of, self._versioned))
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._samples = [torch.cat(sampler) for sampler in self._samplers]

    def _sampled_change(self) -> bool:
        return not all(map(torch.equal, map(torch.cat, self._samplers), self._samples))

    def _forget_sampled_changes(self) -> None:
        """A change that raised no version says nothing about which tensors it was in."""
        if self._sampled_change():
            self._hashed = {}


def _stamp(tensor: torch.Tensor) -> tuple[int, int]:
    return (0 if tensor.is_inference() else tensor._version, tensor.data_ptr())


def _sampler(tensor: torch.Tensor) -> torch.Tensor:
    """A view, of one dimension, of elements that are spread out over the tensor's memory."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    step = -(-span // _SAMPLE_SIZE)
    view = tensor.detach().as_strided((-(-span // step),), (step,), tensor.storage_offset())
    return view.view(_INTEGERS[tensor.element_size()])


def _hash_bytes(tensor: torch.Tensor) -> bytes:
    in_order = tensor.detach().cpu().contiguous().flatten()
    values: NDArray[np.uint8] = in_order.view(torch.uint8).numpy()
    return hashlib.sha256(values.data).digest()
