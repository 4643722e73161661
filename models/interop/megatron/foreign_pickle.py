"""Read pickles written by other programs without running them.

A pickle is a program that names functions and calls them. This reader only looks each name up in an allow list, and imports
nothing. Objects of a listed class become inert records of the constructor's arguments. Any other name stops the reading before a
call.

    torch.distributed...MetadataIndex("x", ..)  ->  Inert: origin, arguments, state         on the list
    os.system("..")                             ->  CheckpointError that names os.system    not on the list

Time and memory are bounded by the input's length:

- An archive may not unpack to more bytes than the archive itself has.
- A tensor may not have more elements than its storage.
- A pickle may not use a memo index above its own length in bytes.
- Dict keys and set members are checked before they are hashed, since hashing 60 nested tuples can take thousands of years. Only the
  pure-Python unpickler, `pickle._Unpickler`, allows such a check.
"""

import io
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

import torch

from triaxis.engine.errors import CheckpointError, shown
from triaxis.engine.numerics.precision import DTYPES

_VALUES_PER_BYTE = 16
"""Number of key values that may be hashed per byte of a pickle. Two bytes can repeat an earlier key, but keys have few values."""

Name = tuple[str, str]
"""(module, name) as written in a pickle."""

_DTYPES = ("bfloat16", "float16", "float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "FloatStorage": DTYPES["fp32"],
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class Inert:
    """Inert record of an object, with its class's name, constructor arguments and state."""

    origin: str = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "Inert":
        made = super().__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    def __init__(self, *arguments: Any) -> None:
        """Ignore the arguments, which `__new__` stores, since some pickles call only `__new__`."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{self.origin}{self.arguments}"

    def get(self, name: str, default: Any = None) -> Any:
        """Return the pickled object's attribute `name`, or `default` if `state` does not have it."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


def read_pickle(content: bytes, allowed: Collection[Name], prefix: str, source: str) -> Any:
    """Read a pickle, with an `Inert` in place of every instance.

    Args:
        allowed: classes that the pickle may name, in addition to torch's dtypes and shapes.
        prefix: start of the names of further modules that the pickle may name, without importing them; "" allows none.
        source: file name, for messages.

    Raises:
        CheckpointError: the pickle names anything else, is malformed, or would need more memory than its length justifies.
    """
    return _read(content, allowed, prefix, source, None)


def read_archive(content: bytes, allowed: Collection[Name], prefix: str, source: str) -> Any:
    """Read an archive written by torch.save.

    Its tensors become CPU tensors.

    Raises:
        CheckpointError: same cases as `read_pickle`; or the content is not such an archive, is in torch's old format without a zip
            file, has compressed entries, or unpacks to more than its length.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _check_sizes(archive, len(content))
            (pickled,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            folder = pickled.removesuffix("data.pkl")
            return _read(archive.read(pickled), allowed, prefix, source, (archive, folder))
    except (zipfile.BadZipFile, ValueError, LookupError, RuntimeError, OSError, EOFError) as error:
        raise CheckpointError(
            f"{source} is not a torch.save archive: {_short(error)}. It is damaged, or was written by a version of torch before "
            "1.6. Restore it from a copy."
        ) from None


def _check_sizes(archive: zipfile.ZipFile, num_bytes: int) -> None:
    """Refuse an archive whose entries are compressed, or claim more bytes than the archive has."""
    entries = archive.infolist()
    if packed := next((entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED), None):
        raise zipfile.BadZipFile(f"{shown(packed.filename)} in it is compressed, which torch.save never does")
    if (claimed := sum(entry.file_size for entry in entries)) > num_bytes:
        raise zipfile.BadZipFile(f"its entries claim {claimed:,} bytes, and the archive has {num_bytes:,}")


def _check_numbers(content: bytes) -> None:
    """Refuse a pickle with a memo index above its length in bytes. Python would allocate a table that large at once."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "LONG_BINPUT") and argument is not None and argument > len(content):
            raise pickle.UnpicklingError(f"object number {argument:,} in {len(content):,} bytes")


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 300 else f"{text[:300]}.."


def _read(
    content: bytes, allowed: Collection[Name], prefix: str, source: str, archive: tuple[zipfile.ZipFile, str] | None
) -> Any:
    reader = _Reader(content, frozenset(allowed), prefix, source, archive)
    try:
        _check_numbers(content)
        return reader.load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise CheckpointError(
            f"{source} cannot be read: {type(error).__name__}: {_short(error)}. It is damaged, or not one of Megatron's "
            "files. Restore it from a copy."
        ) from None


class _Keys:
    """A limit on the work of hashing one pickle's dict keys and set members.

    A short pickle can nest tuples that share parts. Hashing such tuples may take exponential time.

    Args:
        num_bytes: length of the pickle. The limit is proportional to this length, so keys without shared parts never exceed it.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_left = _VALUES_PER_BYTE * num_bytes

    def check(self, keys: Iterable[Any]) -> None:
        """Count the values in `keys` towards the limit.

        A nested tuple or frozenset counts each time it occurs.

        Raises:
            UnpicklingError: the keys exceed the limit.
        """
        for key in keys:
            within = [key]
            while within:
                value = within.pop()
                self._num_left -= 1 + (value.bit_length() >> 5 if isinstance(value, int) else 0)
                if isinstance(value, tuple | frozenset):
                    self._num_left -= len(value)
                    within += value if self._num_left >= 0 else ()
                if self._num_left < 0:
                    raise pickle.UnpicklingError("its keys are tuples that share parts, and hashing them would not end")


_HASHED = {
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(0, None, 2),
    pickle.DICT: slice(0, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}
"""Opcode -> slice of the reader's stack whose values the opcode hashes. The stack starts after the last MARK opcode."""


def _checking(opcode: bytes, hashed: slice) -> Callable[[Any], None]:
    """Wrap an opcode's handler so that the values it hashes are checked first."""
    carry_out: Callable[[Any], None] = pickle._Unpickler.dispatch[opcode[0]]

    def check_and_carry_out(reader: Any) -> None:
        reader.keys.check(reader.stack[hashed])
        carry_out(reader)

    return check_and_carry_out


class _Reader(pickle._Unpickler):
    stack: list[Any]
    dispatch: ClassVar = {
        **pickle._Unpickler.dispatch,
        **{opcode[0]: _checking(opcode, hashed) for opcode, hashed in _HASHED.items()},
    }

    def __init__(
        self,
        content: bytes,
        allowed: frozenset[Name],
        prefix: str,
        source: str,
        archive: tuple[zipfile.ZipFile, str] | None,
    ) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = allowed
        self._prefix = prefix
        self._source = source
        self._archive = archive
        self._storages: dict[str, torch.Tensor] = {}
        self.keys = _Keys(len(content))

    def _set(self, members: Iterable[Any] = ()) -> set[Any]:
        """Build a `set` whose members do not take too long to hash (see `_Keys`)."""
        members = list(members)
        self.keys.check(members)
        return set(members)

    def _ordered_dict(self, items: Iterable[tuple[Any, Any]] = ()) -> "OrderedDict[Any, Any]":
        """Build an `OrderedDict` whose keys do not take too long to hash (see `_Keys`)."""
        items = [(key, value) for key, value in items]
        self.keys.check(key for key, _ in items)
        return OrderedDict(items)

    def find_class(self, module: str, name: str) -> Any:
        """Return the safe replacement for a class or function that the pickle names.

        Any name without a replacement is refused before it can be called."""
        # A dotted name could reach through an allowed class into its module's imports.
        is_plain = "." not in name
        if is_plain and module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        if is_plain and module == "torch" and name in _STORAGES and self._archive is not None:
            return _STORAGES[name]
        known = _KNOWN.get((module, name))
        if known is set:
            return self._set
        if known is OrderedDict:
            return self._ordered_dict
        if known is not None:
            return known
        if is_plain and ((module, name) in self._allowed or (self._prefix and module.startswith(self._prefix))):
            return type(name, (Inert,), {"origin": f"{module}.{name}"})
        raise CheckpointError(
            f"{self._source} refers to {module}.{name}, which no checkpoint of Megatron-Core needs. A pickle that names other "
            "things can run arbitrary code; none of it was run. Ask where the file comes from. If it is yours, save it again "
            "with plain numbers and strings in Megatron's args."
        )

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """Read a storage's raw bytes as a 1-D tensor that covers the whole storage."""
        if self._archive is None:
            raise pickle.UnpicklingError("a tensor outside of an archive")
        _, dtype, key, _, numel = pid
        if not isinstance(key, str):
            raise pickle.UnpicklingError("a storage whose key is no text")
        # Tensors may share a storage; its bytes are read only once.
        if key in self._storages and self._storages[key].dtype == dtype:
            return self._storages[key]
        archive, folder = self._archive
        raw = archive.read(f"{folder}data/{key}")
        if not isinstance(dtype, torch.dtype) or len(raw) != numel * dtype.itemsize:
            raise pickle.UnpicklingError(f"{len(raw)} bytes for {numel} elements of {dtype}")
        # A bytearray is writable, as a tensor must be; frombuffer rejects an empty one.
        made = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return self._storages.setdefault(key, made)


def _encode(text: str, encoding: str) -> bytes:
    """Replacement for `_codecs.encode`, with which old pickles write bytes. Only Latin-1, UTF-8 and ASCII are accepted."""
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise pickle.UnpicklingError(f"the encoding {shown(encoding)}")
    return text.encode(encoding)


def _rebuild_tensor(
    storage: torch.Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> torch.Tensor:
    """Replacement for `torch._utils._rebuild_tensor_v2`. A tensor with more elements than its storage is refused."""
    if math.prod(size) > storage.numel():  # a stride of 0 turns one element into any number
        raise pickle.UnpicklingError(
            f"a tensor of {shown(math.prod(size))} elements from {storage.numel():,} in its storage"
        )
    return storage.as_strided(size, stride, offset)


def _layout(name: Any) -> str:
    """Replacement for `torch.serialization._get_layout`. Returns the layout's name, and refuses anything but text."""
    if not isinstance(name, str):
        raise pickle.UnpicklingError(f"{shown(name)} where the name of a layout belongs")
    return name


def _member(owner: Any, name: Any) -> Inert:
    """Replacement for `getattr`, with which Python 3.11.0 to 3.11.3 pickle enum members.

    Returns a record of class and name. Only classes on the allow list are accepted.
    """
    if not (isinstance(owner, type) and issubclass(owner, Inert) and isinstance(name, str)):
        raise pickle.UnpicklingError(f"an attribute of {shown(owner)}, which is no class of Megatron-Core")
    return owner(name)


_KNOWN: dict[Name, Any] = {
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _encode,
    ("builtins", "getattr"): _member,
    ("__builtin__", "getattr"): _member,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
}
"""Names that are not class records: containers, shapes, tensors, enum members. Each only holds data."""
