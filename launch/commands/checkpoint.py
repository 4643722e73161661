"""`triaxis checkpoint` inspects and compares checkpoints in one process.

inspect       shows the content, where the run stood, and the checkpoints from which this one descends
diff          finds the first tensor that differs between A and B, the place in it, and other differences
check         compares every byte with the hashes taken while it was written
fingerprint   shows a number that does not depend on the layout, as stored or computed from the bytes

A checkpoint is named by its folder, a folder of checkpoints (the latest) or a run directory.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from triaxis.engine.config.values.optimizer_kinds import EMA
from triaxis.engine.errors import CheckpointError, attempt_name, counted
from triaxis.engine.telemetry.outlets.format import compact, in_bytes, significant
from triaxis.engine.telemetry.record.parameters import MODULES, module_of
from triaxis.launch.pictures.tables import terminal_table
from triaxis.launch.start.command_line import CommandParser, add_checkpoint, print_json

if TYPE_CHECKING:  # these import torch, which takes a second, too long for --help
    from triaxis.engine.checkpoint.directory import Candidate
    from triaxis.engine.checkpoint.format.manifest import Manifest
    from triaxis.launch.inspect.check import CheckpointCheck
    from triaxis.launch.inspect.compare import TensorDifference, ValueDifferences

INSPECT_EXAMPLES = """examples:
  triaxis checkpoint inspect runs/gpt_tiny
  triaxis checkpoint inspect runs/gpt_tiny/checkpoints/step_00001000 --tensors
"""
DIFF_EXAMPLES = """examples:
  triaxis checkpoint diff runs/tp2 runs/pp2

Exit code 0 if all tensors are equal, 1 if any differs, 2 if one of the two cannot be read.
"""
CHECK_EXAMPLES = """examples:
  triaxis checkpoint check runs/gpt_tiny
  triaxis checkpoint check runs/gpt_tiny/checkpoints/step_00001000

Exit code 0 if every byte is as it was written, 1 if any file is damaged, 2 if there is no checkpoint.
"""
FINGERPRINT_EXAMPLES = """examples:
  triaxis checkpoint fingerprint runs/gpt_tiny
  triaxis checkpoint fingerprint runs/gpt_tiny --recompute
"""
PROBLEMS_PER_FILE = 3
FIELDS_PER_SECTION = 12
"""How much of long lists is shown."""


def add_arguments(parser: CommandParser) -> None:
    parser.renamed = {"verify": "`triaxis checkpoint check`"}
    look = parser.add_verb("inspect", "print the contents of a checkpoint", "CHECKPOINT [--tensors]", INSPECT_EXAMPLES)
    look.set_defaults(verb_function=inspect)
    add_checkpoint(look, "path")
    look.add_argument("--tensors", action="store_true", help="list every tensor: shape and dtype")

    summary = "find where two checkpoints differ, whatever layouts wrote them"
    compare = parser.add_verb("diff", summary, "A B", DIFF_EXAMPLES)
    compare.set_defaults(verb_function=diff)
    compare.add_argument("one", type=Path, metavar="A", help="a checkpoint")
    compare.add_argument("other", type=Path, metavar="B", help="a checkpoint of the same model")

    files = parser.add_verb("check", "read every byte and check its hash", "CHECKPOINT", CHECK_EXAMPLES)
    files.set_defaults(verb_function=check)
    files.add_argument("path", type=Path, metavar="CHECKPOINT", help="one of them; of a folder or run directory, all")

    summary = "print the number that no layout changes"
    number = parser.add_verb("fingerprint", summary, "CHECKPOINT [--recompute]", FINGERPRINT_EXAMPLES)
    number.set_defaults(verb_function=fingerprint)
    add_checkpoint(number, "path")
    number.add_argument(
        "--recompute", action="store_true", help="from the bytes; exit code 1 if it is not the stored one"
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen action, such as `inspect` or `diff`. Raises CheckpointError if there is no checkpoint."""
    function: Callable[[argparse.Namespace], int] = args.verb_function
    return function(args)


def inspect(args: argparse.Namespace) -> int:
    """Print a checkpoint's facts and its parameters by module; with --tensors also each tensor's shape and dtype."""
    from triaxis.engine.checkpoint.directory import find

    candidate = find(args.path)
    console = _console()
    manifest = candidate.manifest
    console.print(str(candidate.folder), style="bold", markup=False)
    for name, value in _facts(manifest):
        console.print(f"  {name:<12} {value}", markup=False)
    console.print(_module_table(manifest))
    if args.tensors:
        console.print(_tensor_table(manifest))
    if args.json:  # long for a large checkpoint, so built only if needed
        print_json(args, _as_json(candidate))
    return 0


def diff(args: argparse.Namespace) -> int:
    """Print two checkpoints' differences. The exit code is 1 if any tensor differs in more than its dtype."""
    from triaxis.engine.checkpoint.directory import find
    from triaxis.launch.inspect.compare import compare_values, differences

    a, b = find(args.one), find(args.other)
    certain: list[TensorDifference] = []
    values: dict[tuple[str, str], ValueDifferences] = {}
    recast = 0
    for difference in differences(a.manifest, b.manifest):
        key = difference.name, difference.kind
        if difference.verdict == "other dtype":
            values[key] = compare_values(a, b, *key)
            if values[key].num_different == 0:
                recast += 1
                continue
        elif difference.verdict == "other values" and not certain:
            values[key] = compare_values(a, b, *key)
        certain.append(difference)
    _show_diff(_console(), a, b, certain, values, recast)
    if args.json:
        print_json(args, _diff_as_json(a, b, certain, values, recast))
    return 1 if certain else 0


def check(args: argparse.Namespace) -> int:
    """Read every byte of one checkpoint, or of all in a folder. The exit code is 1 if anything is damaged."""
    from triaxis.engine.checkpoint.directory import folders_at
    from triaxis.launch.inspect.check import check_files

    folders = folders_at(args.path)
    console = _console()
    found: dict[str, tuple[str, ...]] = {}
    for folder in folders:
        with _progress(console, folder.name, _data_bytes(folder)) as progress:
            checked = check_files(folder, progress)
        _show_checked(console, checked)
        found[str(folder)] = checked.problems
    whole = sum(not problems for problems in found.values())
    if len(folders) > 1:
        console.print(f"{whole} of {len(folders)} checkpoints are complete and undamaged")
    print_json(args, {"problems": found})
    return 0 if whole == len(folders) else 1


def fingerprint(args: argparse.Namespace) -> int:
    """Print the stored fingerprint for each kind of state, such as weights.

    With --recompute, each is also computed from the files. The exit code is then 1 if one differs.
    """
    from triaxis.engine.checkpoint.directory import find
    from triaxis.launch.inspect.check import check_files

    candidate = find(args.path)
    stored = candidate.manifest.fingerprint
    console = _console()
    for kind, number in stored.items():
        console.print(f"{kind:<12}{number}")
    if not args.recompute:
        print_json(args, stored)
        return 0
    with _progress(console, "fingerprint", _data_bytes(candidate.folder)) as progress:
        checked = check_files(candidate.folder, progress)
    if damaged := [problem for problem in checked.problems if not problem.startswith("manifest.json")]:
        raise CheckpointError(
            f"{candidate.folder} is damaged: {damaged[0]}. `triaxis checkpoint check` names all that is."
        )
    computed = checked.fingerprint
    print_json(args, {"stored": stored, "recomputed": computed})
    if computed == stored:
        console.print("recomputed from the bytes: the same")
        return 0
    for kind, number in computed.items():
        console.print(
            f"{kind:<12}{number} recomputed"
            + ("" if stored.get(kind) == number else "; it differs from the stored one")
        )
    return 1


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _facts(manifest: "Manifest") -> Iterator[tuple[str, str]]:
    state = manifest.state
    content = "weights only: to start from, not to resume"
    if manifest.content == "training":
        average = ", and the moving average of the weights" if EMA in manifest.kinds else ""
        content = f"training: weights and the optimizer's moments{average}"
    yield "content", content
    yield "run", f"{manifest.run}, {attempt_name(manifest.attempt)}, written {manifest.written_at}"
    yield (
        "step",
        f"{state.step:,}; {state.consumed_samples:,} samples, {compact(state.consumed_tokens)} tokens consumed; "
        f"{state.num_updates:,} updates, lr {significant(state.lr)}",
    )
    yield "size", f"{_size(manifest)}, {', '.join(_dtypes(manifest))}"
    yield "parameters", f"{manifest.num_parameters:,} in {len(manifest.tensors):,} tensors"
    sizes = {key: value for key, value in manifest.layout.items() if not isinstance(value, dict)}
    yield "written by", ", ".join(f"{key} {_short(value)}" for key, value in sizes.items()) or "one process, no layout"
    versions = manifest.layout.get("versions")
    if isinstance(versions, dict):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    for key, value in state.data.items():
        yield "data", f"{key}: {_short(value)}"
    if state.wandb_id is not None:
        yield "wandb", state.wandb_id
    for ancestor in manifest.lineage:
        what = "all of" if ancestor.loaded == "all" else "the weights of"
        yield "descends from", f"{what} {ancestor.path}, step {ancestor.step:,}"
    for kind, number in manifest.fingerprint.items():
        yield "fingerprint", f"{number} {kind}"


def _module_table(manifest: "Manifest") -> Table:
    counts = _by_module(manifest)
    table = terminal_table("  module", "tensors", "parameters", "share", names=("  module",))
    for module, (tensors, numel) in counts.items():
        table.add_row(f"  {module}", f"{tensors:,}", f"{numel:,}", f"{numel / manifest.num_parameters:.1%}")
    return table


def _tensor_table(manifest: "Manifest") -> Table:
    from triaxis.launch.inspect.compare import tensors_of

    dtypes: dict[str, dict[str, str]] = {}
    for (name, kind), tensor in tensors_of(manifest).items():
        dtypes.setdefault(name, {})[kind] = "+".join(sorted(tensor.dtypes))
    columns = ("  tensor", "shape", "dtype")
    table = terminal_table(*columns, names=columns)
    for name, info in manifest.tensors.items():
        mine = dtypes.get(name, {})
        same = len(set(mine.values())) == 1
        shown = next(iter(mine.values())) if same else ", ".join(f"{kind} {dtype}" for kind, dtype in mine.items())
        table.add_row(f"  {name}", str(list(info.shape)), shown)
    return table


def _by_module(manifest: "Manifest") -> dict[str, tuple[int, int]]:
    """Return (number of tensors, number of parameters) by module, without empty modules."""
    tensors: Counter[str] = Counter(map(module_of, manifest.tensors))
    numels: Counter[str] = Counter()
    for name, info in manifest.tensors.items():
        numels[module_of(name)] += math.prod(info.shape)
    return {module: (tensors[module], numels[module]) for module in MODULES if module in tensors}


def _dtypes(manifest: "Manifest") -> list[str]:
    return sorted({piece.dtype for file in manifest.files for piece in file.pieces})


def _as_json(candidate: "Candidate") -> dict[str, Any]:
    manifest = candidate.manifest
    tree = manifest.model_dump(mode="json")
    tree["files"] = [
        {"name": file.name, "num_bytes": file.num_bytes, "num_pieces": len(file.pieces)} for file in manifest.files
    ]
    modules = {module: numel for module, (_, numel) in _by_module(manifest).items()}
    return {
        "path": str(candidate.folder),
        "num_parameters": manifest.num_parameters,
        "num_bytes": manifest.num_bytes,
        "dtypes": _dtypes(manifest),
        "parameters_by_module": modules,
        **tree,
    }


def _show_diff(
    console: Console,
    a: "Candidate",
    b: "Candidate",
    found: "list[TensorDifference]",
    values: "dict[tuple[str, str], ValueDifferences]",
    recast: int,
) -> None:
    from triaxis.launch.inspect.compare import compared_kinds, other_fields, tensors_of

    console.print(f"A  {a.folder}", markup=False)
    console.print(f"B  {b.folder}", markup=False)
    kinds = compared_kinds(a.manifest, b.manifest)
    if a.manifest.content != b.manifest.content:
        console.print(f"A holds {a.manifest.content}, B {b.manifest.content}: only the weights are compared")
    elif EMA in {*a.manifest.kinds, *b.manifest.kinds} - {*kinds}:
        console.print(
            f"only {'A' if EMA in a.manifest.kinds else 'B'} has a moving average of the weights, which is not compared"
        )
    compared = {key for side in (a, b) for key in tensors_of(side.manifest) if key[1] in kinds}
    if not found:
        console.print(f"all {len(compared):,} tensors are equal ({', '.join(kinds)})")
    else:
        first = found[0]
        console.print(f"{len(found):,} of {len(compared):,} tensors differ; the first is {first.kind} of {first.name}:")
        for line in _difference_lines(first, values.get((first.name, first.kind))):
            console.print(f"  {line}", markup=False)
    if recast:
        dtypes = " | ".join("+".join(_dtypes(side.manifest)) for side in (a, b))
        console.print(f"{recast:,} tensors have equal values in other dtypes ({dtypes})")
    for name in ("state", "layout", "config"):
        trees = [side.manifest.model_dump(mode="json")[name] for side in (a, b)]
        fields = list(other_fields(*trees))
        for key, in_a, in_b in fields[:FIELDS_PER_SECTION]:
            console.print(f"{name}.{key}: {_short(in_a)} | {_short(in_b)}", markup=False)
        if len(fields) > FIELDS_PER_SECTION:
            console.print(f"{name}: and {len(fields) - FIELDS_PER_SECTION:,} more fields; --json has all", markup=False)


def _difference_lines(difference: "TensorDifference", values: "ValueDifferences | None") -> Iterator[str]:
    one, other = difference.one, difference.other
    if one is None or other is None:
        yield difference.verdict
        return
    if one.shape != other.shape:
        yield f"shape {list(one.shape)} | {list(other.shape)}"
        return
    if one.dtypes != other.dtypes:
        yield f"dtype {'+'.join(sorted(one.dtypes))} | {'+'.join(sorted(other.dtypes))}"
    assert values is not None, "the first tensor that differs was read"
    if values.first is None:
        yield "its fingerprints differ and its bytes do not: one manifest is wrong; `triaxis checkpoint check` names it"
        return
    index, in_a, in_b = values.first
    yield f"first at {list(index)}: {in_a!r} | {in_b!r}"
    yield f"{values.num_different:,} of {values.numel:,} elements ({values.num_different / values.numel:.2%})"
    yield f"largest difference {values.largest_absolute:.6g}, relative {values.largest_relative:.6g}"


def _diff_as_json(
    a: "Candidate",
    b: "Candidate",
    found: "list[TensorDifference]",
    values: "dict[tuple[str, str], ValueDifferences]",
    recast: int,
) -> dict[str, Any]:
    from triaxis.launch.inspect.compare import compared_kinds, other_fields

    tensors = []
    for difference in found:
        entry: dict[str, Any] = {"name": difference.name, "kind": difference.kind, "verdict": difference.verdict}
        read = values.get((difference.name, difference.kind))
        if read is not None:
            entry |= {"num_different": read.num_different, "numel": read.numel}
            if read.first is not None:
                index, in_a, in_b = read.first
                entry |= {
                    "first_index": list(index),
                    "first_values": [repr(in_a), repr(in_b)],
                    "largest_absolute": read.largest_absolute,
                    "largest_relative": read.largest_relative,
                }
        tensors.append(entry)
    trees = [side.manifest.model_dump(mode="json") for side in (a, b)]
    return {
        "a": str(a.folder),
        "b": str(b.folder),
        "compared": list(compared_kinds(a.manifest, b.manifest)),
        "tensors": tensors,
        "equal_in_other_dtypes": recast,
        **{
            name: {key: [in_a, in_b] for key, in_a, in_b in other_fields(trees[0][name], trees[1][name])}
            for name in ("state", "layout", "config")
        },
    }


def _show_checked(console: Console, checked: "CheckpointCheck") -> None:
    folder, manifest = checked.folder, checked.manifest
    if manifest is not None and not checked.problems:
        console.print(
            f"{folder}: complete and undamaged; {_size(manifest)}, "
            f"{len(manifest.tensors):,} tensors, master {manifest.fingerprint.get('master', '')}",
            markup=False,
        )
        return
    console.print(f"{folder}: damaged", style="bold red", markup=False)
    names = [file.name for file in manifest.files] if manifest is not None else []
    told = dict.fromkeys(names, 0)
    for problem in checked.problems:
        file = next((name for name in names if name in problem), None)
        if file is not None:
            told[file] += 1
            if told[file] > PROBLEMS_PER_FILE:
                continue
        console.print(f"  {problem}", markup=False)
    for name, count in told.items():
        if count > PROBLEMS_PER_FILE:
            console.print(f"  {name}: and {count - PROBLEMS_PER_FILE:,} more", markup=False)


def _data_bytes(folder: Path) -> int:
    """Size of a checkpoint's files, for a progress bar."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


@contextmanager
def _progress(console: Console, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, and nothing in a log file. Yields a function (bytes just read)."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def _size(manifest: "Manifest") -> str:
    return f"{in_bytes(manifest.num_bytes)} in {counted(len(manifest.files), 'file')}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
