"""Keys of the prefix cache for the model that computed the K/V.

A model's key is a SHA-256 over its configuration, the library's version, its modules with their code and attributes
(see `code.py`), the state of its adapters, and its weights. It is the same in every process that loads the same model,
so these processes share prefixes.
Before each pass the key is checked: modules must contain the same modules and tensors, the configuration must equal a
copy, PEFT's layers must have the same active, merged and disabled adapters and scalings, and the weights must be
unchanged (see `weights.py`). Before a prompt's pass all bytes of the weights, the code and the attributes are compared.

The K/V of some models are never shared, because they depend on more; `ModelIdentity.private_because` gives the reason.
"""

from __future__ import annotations

import copy
import hashlib
import json
import operator
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel

from kvservice.client import Sequence
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers.arguments import library_model
from kvservice.integrations.transformers.code import FINGERPRINT, Code

ExtraKeys = list[tuple[int, bytes]]

# Configuration keys that concern single calls or paths, or that the model's class and tensors already cover.
_NOT_OF_THE_MODEL = {
    "_name_or_path",
    "architectures",
    "dtype",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_cache",
}
_LENGTH_REASON = "rotary embeddings depend on the length of the longest sequence of a pass"
_PRIVATE = b"private:"
_END = object()
_values_of: Callable[[dict[Any, Any]], Iterable[Any]] = dict.values


@dataclass(frozen=True)
class ModelIdentity:
    """The current identity of a model.

    `private_because` is the reason why its K/V must not be shared, or empty; with a reason, `key` is not the key of any
    model. `steady_length` is the number of tokens up to which the K/V do not depend on the longest sequence of their
    pass; None if they never do.
    """

    key: bytes
    private_because: str = ""
    steady_length: int | None = None


class _Fingerprint:
    """The identity of one model, and the data that detects changes of it. Thread-safe.

    It is an attribute of the model, since it references parts of it. A copy of the model gets none.
    """

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __init__(self, model: PreTrainedModel) -> None:
        self._lock = threading.Lock()
        self._weights = Weights()
        self._walk(model)

    def identity(self, model: PreTrainedModel, thorough: bool) -> ModelIdentity:
        with self._lock:
            if not self._same_objects(model) or (thorough and not self._code.unchanged()):
                self._walk(model)
            elif not self._weights.unchanged(thorough):
                self._identity = self._identify()
        if any(self._hooks) and any(map(_is_foreign, chain.from_iterable(map(_values_of, self._hooks)))):
            return replace(self._identity, key=b"", private_because="forward hooks may change what the model computes")
        return self._identity

    def _walk(self, model: PreTrainedModel) -> None:
        """Record the parts of the model."""
        modules = list(model.modules())
        tables: list[list[dict[str, Any]]] = [[one._modules, one._parameters, one._buffers] for one in modules]
        self._tables = [table for table in chain.from_iterable(tables) if table]
        self._members = [*self._current_members()]
        self._code = Code(model)
        self._config = copy.deepcopy(vars(model.config))
        self._adapters = [module for module in modules if hasattr(module, "_disable_adapters")]
        self._adapter_states = [_adapter_state(module) for module in self._adapters]
        self._hooks = [*_hook_tables(model)]
        self._steady_length = steady_length(model)
        reasons = chain([_LENGTH_REASON] if self._steady_length is not None else [], _other_reasons(model))
        self._private_because = next(reasons, self._code.unseen)
        named = {} if self._private_because else {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._weights.track(named)
        self._description = _describe(model, self._adapter_states) + self._code.digest
        self._identity = self._identify()

    def _identify(self) -> ModelIdentity:
        if self._private_because:
            return ModelIdentity(b"", self._private_because, self._steady_length)
        return ModelIdentity(hashlib.sha256(self._description + self._weights.digest()).digest())

    def _current_members(self) -> Iterator[object]:
        return chain(chain.from_iterable(map(_values_of, self._tables)), (_END,))

    def _same_objects(self, model: PreTrainedModel) -> bool:
        return (
            all(map(operator.is_, self._current_members(), self._members))
            and vars(model.config) == self._config
            and all(map(operator.eq, map(_adapter_state, self._adapters), self._adapter_states))
        )


def identify(model: PreTrainedModel, thorough: bool = True) -> ModelIdentity:
    """Return the model's current identity. `thorough` also detects changes of code, of attributes, and of weights that
    do not raise their version; it costs about as much as computing a token and is for passes that compute a prompt."""
    fingerprint: _Fingerprint | None = vars(model).get(FINGERPRINT)
    if fingerprint is None:
        fingerprint = vars(model)[FINGERPRINT] = _Fingerprint(model)
    return fingerprint.identity(model, thorough)


def forget(model: PreTrainedModel) -> None:
    """Drop the recorded identity of a model, so that the next call computes it again."""
    vars(model).pop(FINGERPRINT, None)


def model_keys(model: torch.nn.Module) -> ExtraKeys:
    """Return the `extra_keys` for the allocation of a sequence whose K/V a model computes in `forward`.

    If the K/V of the model must not be shared, the key is random, so call this once per sequence.
    """
    identity = identify(library_model(model))
    return private_keys() if identity.private_because else shared_keys(identity)


def shared_keys(identity: ModelIdentity) -> ExtraKeys:
    return [(0, b"model:" + identity.key)]


def private_keys() -> ExtraKeys:
    return [(0, _PRIVATE + secrets.token_bytes(16))]


def check_sequences(model: PreTrainedModel, sequences: Iterable[Sequence], prompts: bool) -> None:
    """Check the sequences of a step before a model computes it. `prompts` says that some have more than one token.

    Raises FailedPreconditionError unless they were allocated with the current `model_keys` of the model, and
    InvalidArgumentError for sequences so long that the K/V of others in the step would depend on them.
    """
    identity = identify(model, thorough=prompts)
    own, steady = shared_keys(identity)[0], identity.steady_length
    for sequence in sequences:
        if steady is not None and sequence.length > steady:
            raise InvalidArgumentError(
                f"{_LENGTH_REASON} beyond {steady} tokens: use generate with a KVServiceCache", field="model"
            )
        keys = sequence.extra_keys
        if own not in keys and not (identity.private_because and any(key.startswith(_PRIVATE) for _, key in keys)):
            raise FailedPreconditionError(
                f"sequence {sequence.sequence_id} was not allocated for this model as it is now, so its K/V would be "
                "shared under a wrong key: allocate it with extra_keys=model_keys(model)"
            )


def steady_length(model: PreTrainedModel) -> int | None:
    """Return up to how many tokens the rotary embeddings of a model do not depend on the longest sequence of a pass, or
    None if they never do."""
    return min(chain.from_iterable(map(_steady_lengths, model.modules())), default=None)


def _steady_lengths(module: Any) -> Iterator[int]:
    rope_types = getattr(module, "rope_type", None)
    names = rope_types if isinstance(rope_types, dict) else {None: rope_types}
    for layer_type, name in names.items():
        if name == "longrope":
            parameters = module.config.rope_parameters
            yield (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
        elif "dynamic" in (name or ""):
            # At the original length itself, the library keeps the frequencies of a longer pass before.
            yield module.original_max_seq_len - 1


def _other_reasons(model: PreTrainedModel) -> Iterator[str]:
    """Yield reasons why the K/V of the model depend on more than the tokens and the model's key."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            yield "positions depend on which tokens are padding"
        kind = type(module)
        saves_more = kind._save_to_state_dict is not torch.nn.Module._save_to_state_dict
        if saves_more or kind.get_extra_state is not torch.nn.Module.get_extra_state:
            yield f"{kind.__name__} keeps weights outside of its parameters and buffers"
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not can_digest(tensor):
            yield f"{name} is a {type(tensor).__name__} whose values are not all local"


def _hook_tables(model: PreTrainedModel) -> Iterator[dict[int, Any]]:
    """Yield the tables of hooks that could change K/V. Forward hooks of the model itself cannot."""
    yield torch_modules._global_forward_pre_hooks
    yield torch_modules._global_forward_hooks
    for module in model.modules():
        yield module._forward_pre_hooks
        if module is not model:
            yield module._forward_hooks


def _is_foreign(hook: Any) -> bool:
    """Return whether a hook is not one of the library's, which only record."""
    return getattr(hook, "__module__", "").partition(".")[0] != "transformers"


def _adapter_state(layer: Any) -> tuple[Any, ...]:
    """Return the active, disabled and merged adapters of a PEFT layer, and their scalings."""
    active = layer._active_adapter
    scaling = getattr(layer, "scaling", None)
    return (
        active if isinstance(active, str) else tuple(active),
        layer._disable_adapters,
        tuple(getattr(layer, "merged_adapters", ())),
        dict(scaling) if isinstance(scaling, dict) else scaling,
    )


def _describe(model: PreTrainedModel, adapter_states: list[tuple[Any, ...]]) -> bytes:
    """Return all parts of the key except the weights and the code, encoded as JSON."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
    modules = [(name, type(one).__qualname__, one.extra_repr()) for name, one in model.named_modules()]
    description = [config, modules, [repr(state) for state in adapter_states]]
    return json.dumps(description, sort_keys=True, default=_plain).encode()


def _plain(value: object) -> object:
    """Encode a value that JSON does not support. It avoids repr, which may contain an object's address."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else type(value).__name__


# ---- a digest of a model's tensors that tracks their changes
#
# The digest covers every byte, so it is the same in every process that loads the same weights. Each tensor is hashed
# once, at about 1.5 GB per second and CPU, and again after a change. Changes are detected as follows:
#
#     optimizers, load_state_dict, copy_, add_ ...   version counters, which torch increments with every in-place change
#     `tensor.data = ...`, to()                      the address of the tensor's memory
#     in-place changes of `tensor.data`, NumPy,      these do not increment the version; checksums of every byte are
#     fused optimizers that write through pointers   compared if the caller requests a thorough check
#
# A thorough check reads every weight twice. It takes about as long as computing one token, which also reads every
# weight.


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


# ---- checksums of tensors, computed in place on any device at about the speed of its memory
#
# A tensor's memory is read as rows of 1,024 words of 8 bytes. The checksum consists of the sums of all rows and the
# sums of all columns, modulo 2^64. A change of one element changes one sum of each kind. Swapped rows change the row
# sums, swapped columns the column sums. Remaining bytes at both ends of the memory are part of the checksum
# themselves.


_WORD = 8
_COLUMNS = 1024


class Checksums:
    """Checksums of a list of tensors. It keeps their memory, so it does not notice if a tensor gets other memory."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._memories = [_memory(tensor) for tensor in tensors]

    def compute(self) -> list[torch.Tensor]:
        """Return one checksum per tensor, int64 `[n]` on the tensor's device, where n depends on the tensor's size."""
        return [torch.cat(_sums(memory)) for memory in self._memories]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether two results of `Checksums.compute` are equal. It makes one comparison per device, which may
    synchronize with the device."""
    pairs: defaultdict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for pair in zip(some, others, strict=True):
        pairs[pair[0].device].append(pair)
    return all(torch.equal(*map(torch.cat, zip(*group, strict=True))) for group in pairs.values())


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from the first element to the last, including gaps between elements, as uint8 `[bytes]`."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    start = tensor.storage_offset() * tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    memory.set_(tensor.untyped_storage(), start, (num_bytes,), (1,))
    return memory


def _sums(memory: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums of rows, the sums of columns, and the remaining bytes, all int64."""
    head = -memory.storage_offset() % _WORD
    num_rows = (len(memory) - head) // (_WORD * _COLUMNS)
    if num_rows <= 0:
        return [memory.long()]
    end = head + num_rows * _WORD * _COLUMNS
    table = memory[head:end].view(torch.int64).view(num_rows, _COLUMNS)
    return [table.sum(1), table.sum(0), memory[:head].long(), memory[end:].long()]
