"""Finds, hashes, loads and copies a user's Python module.

    scaled_mlp.py        a file, loaded under a private name, so that it hides no other module
    mylab/               a package (the folder that holds `__init__.py`), also loaded under a private name
    mylab.layers         a module that Python finds by this name

A run keeps a copy of the sources in its directory, in `extension/<16 digits>/`.

A module is loaded once per digest. The folder of the file or package comes first on `sys.path`, so the module may import its
neighbours. The digest does not cover them.
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from triaxis.engine.errors import TriaxisError
from triaxis.engine.storage.files import write_atomically

PRIVATE = "triaxis_extension_"
"""Prefix of the names under which user modules are loaded; 16 digits of the digest follow."""


EXTENSION = "extension"
"""Folder in a run directory that holds the copies of sources."""


class UserModuleError(TriaxisError):
    """A module that cannot be found, read or run. The message gives file and line, if known, and the reason."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of a module.

    Attributes:
        entry: file that runs first; `__init__.py` for a package.
        name: name under which Python finds the module; "" if it is given by its path.
    """

    entry: Path
    name: str = ""

    @property
    def is_package(self) -> bool:
        return self.entry.name == "__init__.py"

    @property
    def root(self) -> Path:
        """The file itself, or the package's folder."""
        return self.entry.parent if self.is_package else self.entry

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield (path relative to the package, path) for each .py file, sorted. A module that is one file gives ("", path)."""
        if not self.is_package:
            yield "", self.entry
            return
        inside = {path.relative_to(self.root).as_posix(): path for path in self.root.rglob("*.py")}
        yield from sorted(inside.items())

    def digest(self) -> str:
        """Compute the SHA-256 of the files' contents and, for a package, their relative paths, in hexadecimal.

        Raises:
            UserModuleError: a file cannot be read.
        """
        whole = hashlib.sha256()
        for inside, path in self.files():
            try:
                content = path.read_bytes()
            except OSError as error:
                raise UserModuleError(f"{path} cannot be read ({error.strerror})") from error
            whole.update(f"{inside}\0{len(content)}\0".encode() + content)
        return whole.hexdigest()


def is_path(source: str) -> bool:
    """Whether a source is a path, which contains / or ends with .py. Other sources are modules' names."""
    return "/" in source or source.endswith(".py")


def find_sources(source: str) -> Sources:
    """Find a module's sources by path or name.

    Raises:
        UserModuleError: there are none, or Python fails to look up the name.
    """
    if not is_path(source):
        try:
            spec = importlib.util.find_spec(source)
        except Exception as error:  # finding `a.b` runs `a`
            raise UserModuleError(f"Python fails to look for it ({type(error).__name__}: {error})") from error
        if spec is None or not spec.has_location or spec.origin is None:
            raise UserModuleError(
                "Python finds no module with this name, and it is not a path (a path contains / or ends with .py)"
            )
        return Sources(Path(spec.origin), source)
    path = Path(source)
    if path.is_dir():
        path = path / "__init__.py"
    if not path.is_file():
        raise UserModuleError(
            "there is no such file" if path.suffix == ".py" else "it is neither a .py file nor a package"
        )
    return Sources(path)


def loaded(digest: str) -> ModuleType | None:
    """Return the module with this digest; None if it is not loaded."""
    return sys.modules.get(_private(digest))


def load(source: str, digest: str) -> ModuleType:
    """Return the module with this digest. Run the module first if it is not loaded.

    Raises:
        UserModuleError: there is no such module, its sources have another digest, or running it fails.
    """
    if (module := loaded(digest)) is not None:
        return module
    sources = find_sources(source)
    if (found := sources.digest()) != digest:
        raise UserModuleError(f"its sources were changed: their digest is {found[:16]}, not {digest[:16]}")
    try:
        module = importlib.import_module(source) if sources.name else _run(sources, _private(digest))
    except Exception as error:
        raise UserModuleError(f"{_place(error, sources)}{type(error).__name__}: {error}") from error
    sys.modules[_private(digest)] = module
    return module


def place_in_user_module(error: BaseException) -> str:
    """Name the last place in a user module that an error passed through.

    The place has file, line and function. "" if there is none.
    """
    roots = [
        Sources(Path(str(module.__file__))).root for name, module in [*sys.modules.items()] if name.startswith(PRIVATE)
    ]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if any(path == root or root in path.parents for root in roots):
            return f"{frame.filename}, line {frame.lineno}, in {frame.name}"
    return ""


def keep(run: Path, source: str, digest: str) -> None:
    """Copy a module's sources to a run directory.

    Raises:
        UserModuleError: the sources cannot be found or read, or have changed.
        OSError: the copy cannot be written.
    """
    sources = find_sources(source)
    if sources.digest() != digest:
        raise UserModuleError(
            f"{source} has changed since it was loaded: the run's copy would differ from the code it trains"
        )
    for inside, path in sources.files():
        copy = _kept(run, digest) / sources.root.name / inside
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(copy, [path.read_bytes()])


def available_source(source: str, digest: str, run: Path) -> str:
    """Return `source` if its files have this digest, else the path of the copy in `run`.

    If there is no copy, the result is `source` all the same.
    """
    with suppress(UserModuleError):
        if find_sources(source).digest() == digest:
            return source
    kept = next(iter(sorted(_kept(run, digest).glob("*"))), None)
    return source if kept is None else str(kept.absolute())


def _kept(run: Path, digest: str) -> Path:
    return run / EXTENSION / digest[:16]


def _private(digest: str) -> str:
    return PRIVATE + digest[:16]


def _run(sources: Sources, name: str) -> ModuleType:
    folder = str(sources.root.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    inside = [str(sources.root)] if sources.is_package else None
    spec = importlib.util.spec_from_file_location(name, sources.entry, submodule_search_locations=inside)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses, pickles and relative imports look up a module by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _place(error: BaseException, sources: Sources) -> str:
    """Format the last line in the sources that an error passed through; "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: "
    files = {str(path) for _, path in sources.files()}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""
