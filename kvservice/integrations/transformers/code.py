"""The parts of a model that compute, besides its weights: the code of its modules, and the objects in them.

From the classes and attributes of the modules it follows functions, classes and values to all that they name: the code
as loaded, not as on disk. It ends at installed packages, which count by name and version, except for the library's own
model files. Values are numbers, strings, dtypes and collections of these. Of anything else, such as a tensor outside of
parameters and buffers, the values cannot be known: `unseen` says what it is.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import json
import operator
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GenericAlias,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

FINGERPRINT = "_kvservice_fingerprint"
"""The attribute of a model that holds its identity, see `keys`."""

# torch's own, and attributes for the origin and the training of a model.
_OF_MODULES = set(vars(torch.nn.Module())) | {
    FINGERPRINT,
    "_compiled_call_impl",
    "_gradient_checkpointing_func",
    "_is_hf_initialized",
    "gradient_checkpointing",
    "name_or_path",
}
# These change while a model stays the same.
_CHANGING = {FINGERPRINT, "_compiled_call_impl", "training"}
# Parts of a class that are no code, or depend on where it stands in its file.
_OF_CLASSES = {
    "__annotations__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__static_attributes__",
    "__weakref__",
    "_abc_impl",
}
# Packages that count as installed wherever they are.
_PACKAGES = {"accelerate", "builtins", "kvservice", "numpy", "peft", "torch", "transformers"}
_LIBRARY_MODELS = "transformers.models."
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice)
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_COLLECTIONS = (list, tuple, dict, OrderedDict, defaultdict, deque, torch.Size)
_DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod)
# Objects whose call is the call of a function.
_CALLING = (FunctionType, MethodType, functools.partial, staticmethod, classmethod, property)
_NAMED = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, GenericAlias, UnionType)
# Objects of these packages do not change what code computes: loggers, locks, patterns, registries of the library.
_INERT = {"_thread", "accelerate", "logging", "peft", "re", "threading", "transformers", "typing", "warnings"}
_END = object()

_Check = Callable[[], bool]


class Code:
    """The code and the objects of a model, at the time of making this."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.unseen = ""
        self._checks: list[_Check] = []
        self._config = id(model.config)
        self._modules = {id(module): name for name, module in model.named_modules()}
        # Functions and classes by id, with their numbers: each is described once. The list keeps them alive.
        self._numbers: dict[int, str] = {}
        self._found: list[FunctionType | type] = []
        # Collections that are being described, by id, because one may contain itself.
        self._open: set[int] = set()
        described: list[object] = [self._module(name, module) for name, module in model.named_modules()]
        for one in self._found:  # it grows in this loop
            described.append(self._function(one) if isinstance(one, FunctionType) else self._class(one))
        self.digest = hashlib.sha256(json.dumps(described).encode()).digest()
        del self._modules, self._numbers

    def unchanged(self) -> bool:
        """Return whether all is the same object as it was. It takes a microsecond for each module."""
        return all(check() for check in self._checks)

    def _module(self, name: str, module: torch.nn.Module) -> object:
        attributes = vars(module)
        self._checks.append(_module_check(module))
        # The library's models have records of their own, such as plans for several devices.
        recorded = isinstance(module, PreTrainedModel) and _is_installed(type(module).__module__)
        described = [
            [key, self._value(value, f"{name}.{key}" if name else key)]
            for key, value in sorted(attributes.items(), key=operator.itemgetter(0))
            if key not in _OF_MODULES and not (recorded and key.startswith("_") and not _is_foreign(value))
        ]
        return [name, self._reference(type(module)), described]

    def _value(self, value: Any, place: str, strict: bool = True) -> object:
        """Describe a value for JSON. With `strict`, one that cannot be described is unseen."""
        kind = type(value)
        if isinstance(value, enum.Enum):
            return [kind.__qualname__, value.name]
        if kind in _PLAIN or isinstance(value, (*_TORCH_PLAIN, *_NAMED)):
            return [kind.__name__, repr(value) if kind in _PLAIN else _name(value)]
        if kind in (set, frozenset):
            self._checks.append(_items_check(value))
            return [kind.__name__, sorted(json.dumps(self._value(item, place, strict)) for item in value)]
        if kind in _COLLECTIONS:
            return self._collection(value, place, strict)
        if isinstance(value, FunctionType | type):
            return self._reference(value)
        if isinstance(value, MethodType):
            return ["method", self._value(value.__func__, place), self._value(value.__self__, place, strict)]
        if isinstance(value, functools.partial):
            called = (value.func, value.args, value.keywords)
            return ["partial", *(self._value(part, place, strict) for part in called)]
        if isinstance(value, _DESCRIPTORS):
            parts = [getattr(value, name, None) for name in ("__func__", "func", "fget", "fset", "args", "keywords")]
            return [kind.__name__, *(self._value(part, place, strict) for part in parts)]
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if isinstance(value, torch.nn.Module) and id(value) in self._modules:
            return ["submodule", self._modules[id(value)]]
        if isinstance(value, PreTrainedConfig):
            if id(value) == self._config:
                return ["config"]
            self._checks.append(_items_check(vars(value)))
            return self._value(value.to_dict(), place, False)
        if hasattr(value, "__wrapped__") and callable(value):  # of functools.cache
            return self._value(value.__wrapped__, place, strict)
        if strict and kind.__module__.partition(".")[0] not in _INERT:
            self.unseen = self.unseen or f"{place} is a {kind.__name__}, whose values the key does not cover"
        return ["object", kind.__module__, kind.__qualname__]

    def _collection(self, value: Any, place: str, strict: bool) -> object:
        if id(value) in self._open:
            return ["itself", type(value).__name__]
        self._open.add(id(value))
        if not isinstance(value, tuple):
            self._checks.append(_items_check(value))
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        described = [type(value).__name__, *(self._value(item, place, strict) for item in items)]
        self._open.remove(id(value))
        return described

    def _reference(self, value: FunctionType | type) -> str:
        """Return a name of a function or class, which is described later."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = f"{len(self._found)} {value.__module__}.{value.__qualname__}"
            self._found.append(value)
        return self._numbers[id(value)]

    def _class(self, kind: type) -> object:
        """Describe a class. Of an installed one the name counts, and code from elsewhere that was put into it."""
        self._checks.append(_items_check(vars(kind)))
        described: list[object] = [_version(kind.__module__), *(self._reference(base) for base in kind.__bases__)]
        installed = _is_installed(kind.__module__)
        followed = _is_followed(kind.__module__)
        for name, value in sorted(vars(kind).items()):
            if name not in _OF_CLASSES and (followed or _is_foreign(value)):
                place = f"{kind.__qualname__}.{name}"
                described.append([name, self._value(value, place, not installed or _is_foreign(value))])
        return described

    def _function(self, function: FunctionType) -> object:
        module = function.__globals__.get("__name__", "")
        strict = not _is_installed(module)
        place = f"{function.__module__}.{function.__qualname__}"
        described: list[object] = [_version(module)]
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        self._checks.append(_function_check(function, cells))
        parts: list[Any] = [tuple(cells), function.__defaults__, function.__kwdefaults__]
        described += [self._value(part, place, strict) for part in parts]
        if _is_followed(module):
            described.append(self._code(function.__code__))
            described.append({name: self._value(value, place, strict) for name, value in _own_attributes(function)})
            described += self._globals(function, place, strict)
        return described

    def _globals(self, function: FunctionType, place: str, strict: bool) -> Iterator[object]:
        """Describe what a function names outside of itself."""
        names, imported = _names(function.__code__)
        read = {name: function.__globals__[name] for name in names if name in function.__globals__}
        self._checks.append(_globals_check(function.__globals__, read))
        package = function.__globals__.get("__package__") or ""
        modules = [sys.modules.get(name) or sys.modules.get(f"{package}.{name}") for name in imported]
        for name, value in read.items():
            yield [name, self._value(value, f"{name} of {place}", strict)]
        for module in [*read.values(), *modules]:
            if isinstance(module, ModuleType) and _is_followed(module.__name__):
                used = {
                    name: vars(module)[name] for name in _attribute_names(function.__code__) if name in vars(module)
                }
                self._checks.append(_globals_check(vars(module), used))
                for name, value in used.items():
                    yield [module.__name__, name, self._value(value, f"{module.__name__}.{name}", strict)]

    def _code(self, code: CodeType) -> object:
        """Describe the code without its names of files, its lines and its documentation."""
        num_named = code.co_argcount + code.co_kwonlyargcount
        signature = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
        names = [code.co_names, code.co_freevars, code.co_varnames[:num_named]]
        constants = [self._value(constant, code.co_name) for constant in code.co_consts]
        return [hashlib.sha256(code.co_code).hexdigest(), signature, names, constants]


def _module_check(module: torch.nn.Module) -> _Check:
    kind, attributes = type(module), vars(module)
    names = [name for name in attributes if name not in _CHANGING]
    values = [attributes[name] for name in names]

    def check() -> bool:
        same = map(operator.is_, map(attributes.get, names), values)
        size = len(attributes) - len(_CHANGING & attributes.keys())
        return type(module) is kind and size == len(values) and all(same)

    return check


def _items_check(value: Any) -> _Check:
    """Compare a collection's items with those that it has now. Of a class's mapping, the values."""
    if isinstance(value, dict):
        keys, values = _items_check(value.keys()), _items_check(value.values())
        return lambda: keys() and values()
    current = value.values if hasattr(value, "values") else lambda: value
    items = list(current())
    return lambda: len(value) == len(items) and all(map(operator.is_, current(), items))


def _function_check(function: FunctionType, cells: list[Any]) -> _Check:
    before = (function.__code__, function.__defaults__, function.__kwdefaults__)

    def check() -> bool:
        now = (function.__code__, function.__defaults__, function.__kwdefaults__)
        current = (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
        return all(map(operator.is_, now, before)) and all(map(operator.is_, (*current, _END), (*cells, _END)))

    return check


def _globals_check(namespace: dict[str, Any], read: dict[str, Any]) -> _Check:
    names, values = tuple(read), list(read.values())
    return lambda: all(map(operator.is_, map(namespace.get, names), values))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  an empty cell raises
    except ValueError:
        return False
    return True


def _own_attributes(function: FunctionType) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(function).items() if name != "__wrapped__"]


@functools.cache
def _names(code: CodeType) -> tuple[list[str], list[str]]:
    """Return the global names and the modules that code reads, with the code inside of it."""
    names: dict[str, None] = {}
    imported: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names[instruction.argval] = None
        elif instruction.opname == "IMPORT_NAME":
            imported[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner_names, inner_imported = _names(constant)
            names |= dict.fromkeys(inner_names)
            imported |= dict.fromkeys(inner_imported)
    return list(names), list(imported)


def _attribute_names(code: CodeType) -> list[str]:
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in _attribute_names(one)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _is_followed(module: str) -> bool:
    return module.startswith(_LIBRARY_MODELS) or not _is_installed(module)


@functools.cache
def _is_installed(module: str) -> bool:
    """Return whether a module is of a package that is not edited between two runs."""
    package = module.partition(".")[0]
    if package in _PACKAGES or package in sys.stdlib_module_names:
        return True
    found = sys.modules.get(package)
    folder = next(iter(getattr(found, "__path__", ())), None) or getattr(found, "__file__", None)
    if package == "__main__" or not folder:
        return False
    # Installers leave their records beside the packages, in whatever folder.
    beside = Path(folder).parent
    return beside.name in ("site-packages", "dist-packages") or any(beside.glob("*.dist-info"))


def _version(module: str) -> str:
    """Return the version of an installed package. torch's layers are the same in all its versions."""
    package = module.partition(".")[0]
    if package == "torch" or not _is_installed(module):
        return ""
    return str(getattr(sys.modules.get(package), "__version__", ""))


def _is_foreign(value: Any) -> bool:
    """Return whether a value has come into a class or module of an installed package from elsewhere: code, or an object
    of a class, that is not installed."""
    seen: list[Any] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if any(one is other for other in seen):
            continue
        seen.append(one)
        if isinstance(one, FunctionType):
            if not _is_installed(one.__globals__.get("__name__", "")):
                return True
            cells = [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
            waiting += [inner for inner in cells if isinstance(inner, _CALLING)]
        elif isinstance(one, _CALLING):
            waiting += [getattr(one, name) for name in ("__func__", "func", "fget") if hasattr(one, name)]
    return not _is_installed(type(value).__module__)


def _name(value: Any) -> str:
    owner = getattr(value, "__self__", None)
    if isinstance(value, BuiltinFunctionType) and not isinstance(owner, ModuleType | type | None):
        return f"{value.__qualname__} of {type(owner).__qualname__}"
    return str(getattr(value, "__qualname__", "") or value)
