"""Writes and reads the manifest, which describes a checkpoint as readable JSON.

    step_00001000/
        manifest.json            the run's state, and the place and hash of every piece of every tensor
        manifest.sha256          hash of manifest.json, which `sha256sum -c manifest.sha256` checks
        rank_00000.safetensors   rank 0's pieces as 1-D tensors, named kind:name@index with the index of the first element
        rank_00001.safetensors   ..

A piece is a flat range in the row-major local box of one parameter (see `boxes.py`). Pieces are at most `PIECE_BYTES` long, which
bounds a reader's memory. Nothing in a checkpoint is ever executed. JSON is validated field by field, tensors are raw bytes at
stated offsets, and file names cannot leave the folder.
"""

import hashlib
import json
import math
import re
import stat
from collections.abc import Sequence
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from triaxis.engine.checkpoint.format.boxes import box_shape, flat_boxes, intersect
from triaxis.engine.config.names.earlier import translated
from triaxis.engine.config.schema.training import MOST_STEPS
from triaxis.engine.config.values.optimizer_kinds import (
    KIND_PATTERN,
    MASTER,
    OPTIMIZERS,
    OptimizerName,
    StateKind,
    state_kinds,
)
from triaxis.engine.data.skipped import Ranges
from triaxis.engine.errors import CheckpointError
from triaxis.engine.layout.shard_spec import Box
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.storage.redaction import tree_without_secrets, without_secrets
from triaxis.engine.storage.state_files import read_regular

FORMAT_VERSION = 1
"""Version number, increased when a reader for the old format could misread the new one. Every released format stays readable."""

MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.sha256"

MOST_SAMPLES = 2**50
"""Largest number of training samples in a run."""

MOST_TOKENS = 2**60
"""Largest number of training tokens in a run."""

MOST_MANIFEST_BYTES = 2**30
"""Largest manifest that is read. About 200 bytes describe a piece of up to `PIECE_BYTES`, so 100 TB of pieces need 600 MB."""

PIECE_BYTES = 32 * 2**20
"""Largest length of a piece; this bounds a reader's memory."""

Kind = Annotated[StateKind, Field(pattern=f"^{KIND_PATTERN}$")]
"""Kind of saved values: exact weights (in fp32 and float64 the parameters), an optimizer moment, or the weights' average."""

DType = Literal["bfloat16", "float16", "float32", "float64"]
DTYPE_BYTES: dict[DType, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
FileName = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}\.safetensors$")]


def _of_sections(config: dict[str, Any]) -> dict[str, Any]:
    """Translate a saved configuration to today's names. ValueError unless every section is a dict, and `phases` a list."""
    config = translated(config)
    for name, value in config.items():
        if not isinstance(value, list if name == "phases" else dict):
            raise ValueError(f"config.{name} is a {type(value).__name__}")
    return config


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Piece(_Record):
    """Elements [start, stop) of the local box `box` of one tensor, at byte `offset` in the file.

    `xxh3` is the hash of the piece's bytes. `fingerprint` is what the piece adds to the sum defined in `fingerprint.py`.
    """

    name: str
    kind: Kind
    dtype: DType
    box: Annotated[Box, Field(strict=False)]
    start: int = Field(ge=0)
    stop: int = Field(gt=0)
    offset: int = Field(ge=0)
    xxh3: Hex64
    fingerprint: Hex64

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


class DataFile(_Record):
    """One tensor file and its pieces, in the order of their offsets."""

    name: FileName
    num_bytes: int = Field(ge=0)
    pieces: Annotated[tuple[Piece, ...], Field(strict=False)]


class TensorInfo(_Record):
    """A parameter's logical global shape, and whether the parameter is trained.

    Only trained parameters have moments and an average.
    """

    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]
    is_trained: bool = True


class Ancestor(_Record):
    """A checkpoint that a run started from, and what the run loaded from it."""

    path: str
    step: int
    loaded: Literal["all", "weights"]
    fingerprint: dict[Kind, Hex64]


class LossScaleRecord(_Record):
    """The saved state of a dynamic loss scale (`triaxis.engine.optimizer.loss_scale.ScaleState`)."""

    scale: float = Field(gt=0)
    updates: int = Field(ge=0, le=MOST_STEPS)
    hysteresis: int = Field(ge=0, le=MOST_STEPS)


class TrainingState(_Record):
    """A run's state besides its tensors.

    Attributes:
        step: number of optimizer steps so far.
        consumed_samples, consumed_tokens: training data consumed so far; the sample count alone determines the next sample.
        num_updates: number of updates that the moments contain (for Adam's bias correction).
        lr: learning rate of the last step, for information only.
        rng: the seed, on which masks, weights and sample order depend.
        loss_scale: loss scale for the next step; None without a dynamic loss scale.
        data: the samples' fingerprint (key `samples`, or `samples of PHASE`), the tokenizer's identity, and the end-of-document id.
        wandb_id: id of the wandb run.
        skipped: ranges [first, stop) of skipped sample ids (`engine/data/skipped.py`).
        num_rollbacks: number of automatic returns to a checkpoint.
        recent_losses: (step from 0, loss) of the last steps, as many as `RunHistory.limits` needs.
        recent_grad_norms: (step from 0, gradient norm) of the last steps, as many as `RunHistory.limits` needs.
        validation_is_due: whether the validation after `step` has not run yet; the next attempt begins with it.
    """

    step: int = Field(ge=0, le=MOST_STEPS)
    consumed_samples: int = Field(ge=0, le=MOST_SAMPLES)
    consumed_tokens: int = Field(ge=0, le=MOST_TOKENS)
    num_updates: int = Field(ge=0, le=MOST_STEPS)
    lr: float = Field(ge=0)
    rng: dict[str, Any]
    loss_scale: LossScaleRecord | None = None
    data: dict[str, Any]
    wandb_id: str | None = None
    skipped: Annotated[Ranges, Field(strict=False)] = ()
    num_rollbacks: int = Field(0, ge=0, le=MOST_STEPS)
    recent_losses: Annotated[tuple[tuple[int, float], ...], Field(strict=False)] = ()
    recent_grad_norms: Annotated[tuple[tuple[int, float], ...], Field(strict=False)] = ()
    validation_is_due: bool = False

    @classmethod
    def at_start(cls) -> "TrainingState":
        """Return the state of imported plain weights, before the first step, without data and seed."""
        return cls(step=0, consumed_samples=0, consumed_tokens=0, num_updates=0, lr=0.0, rng={}, data={})


class Manifest(_Record):
    """The description of a checkpoint, with everything except the tensors' values.

    Attributes:
        content: `training` (weights, moments and average, resumable) or `weights` (an import, to start from).
        attempt: index of the run's attempt that wrote the checkpoint; attempt and step order checkpoints by age.
        layout: sizes, bucket bytes, threads, kernels, versions, device; a bit-identical resume needs the same layout.
        fingerprint: fingerprint (`fingerprint.py`) by state kind, such as weights or a moment, as hexadecimal text.
        config: resolved configuration; an import has only its `model` section and tokenizer.
        lineage: checkpoints that the run started from, oldest first.
    """

    format_version: int = Field(ge=1, le=FORMAT_VERSION)
    content: Literal["training", "weights"]
    run: str
    attempt: int = Field(ge=0, le=MOST_STEPS)
    written_at: str
    state: TrainingState
    fingerprint: dict[Kind, Hex64]
    layout: dict[str, Any]
    config: Annotated[dict[str, Any], AfterValidator(_of_sections)]
    lineage: Annotated[tuple[Ancestor, ...], Field(strict=False)]
    tensors: dict[str, TensorInfo] = Field(min_length=1)
    files: Annotated[tuple[DataFile, ...], Field(strict=False)]

    @model_validator(mode="after")
    def _its_state_is_known(self) -> "Manifest":
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"config.optimizer.name = {self.optimizer!r} is none of {', '.join(OPTIMIZERS)}")
        kinds_of = {"fingerprint": set(self.fingerprint)}
        kinds_of |= {f"files.{number}": {one.kind for one in file.pieces} for number, file in enumerate(self.files)}
        for where, kinds in kinds_of.items():
            if unknown := kinds - {*self.kinds}:
                raise ValueError(f"{where} has the state {min(unknown)!r}: the optimizer's is {', '.join(self.kinds)}")
        return self

    @property
    def optimizer(self) -> OptimizerName:
        """Optimizer whose state is saved. A configuration that names none means AdamW."""
        name: OptimizerName = self.config.get("optimizer", {}).get("name", "adamw")
        return name

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """State kinds saved for each trained tensor, or only the weights if `content` is `weights`."""
        if self.content != "training":
            return (MASTER,)
        own = (self.config.get("model", {}).get("extension") or {}).get("moments", ())
        return state_kinds(self.optimizer, tuple(own), has_ema=self.config.get("optimizer", {}).get("ema") is not None)

    def kinds_of(self, tensor: TensorInfo) -> tuple[StateKind, ...]:
        """Return the state kinds saved for a tensor, or only the weights if untrained."""
        return self.kinds if tensor.is_trained else (MASTER,)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @cached_property
    def pieces_by_tensor(self) -> dict[tuple[str, Kind], list[tuple[int, Piece]]]:
        """Map each (tensor name, kind) to a list of (file index in `files`, piece)."""
        index: dict[tuple[str, Kind], list[tuple[int, Piece]]] = {}
        for number, file in enumerate(self.files):
            for piece in file.pieces:
                index.setdefault((piece.name, piece.kind), []).append((number, piece))
        return index

    @property
    def num_parameters(self) -> int:
        """Number of elements in all parameters, without padding."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json, then its hash, each atomically, with credentials redacted.

    Raises:
        OSError: the folder cannot be written.
    """
    told = {
        "config": tree_without_secrets(manifest.config),
        "run": without_secrets(manifest.run),
        # Phase names are keys in `data`, so keys are redacted too.
        "state": manifest.state.model_copy(update={"data": tree_without_secrets(manifest.state.data)}),
        "lineage": tuple(
            ancestor.model_copy(update={"path": without_secrets(ancestor.path)}) for ancestor in manifest.lineage
        ),
    }
    content = _to_json(manifest.model_copy(update=told)).encode()
    write_atomically(folder / MANIFEST, [content])
    write_atomically(folder / MANIFEST_HASH, [_hash_line(content)])


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest, and check its hash, its version, every field, and what `manifest_problems` lists.

    Raises:
        CheckpointError: a check failed; the message names the file and the problem.
    """
    manifest = parse_manifest(folder)
    problems = manifest_problems(folder, manifest)
    if problems:
        more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
        lines = "\n".join(f"  {problem}" for problem in [*problems[:12], *more])
        raise CheckpointError(
            f"{folder} is damaged:\n{lines}\nThe missing elements would keep random values. Restore the files from a copy, or load "
            "another checkpoint."
        )
    return manifest


def parse_manifest(folder: Path) -> Manifest:
    """Read a manifest, and check its hash, its version and every field, but no files.

    Raises:
        CheckpointError: a check failed; the message names the file and the problem.
    """
    path = folder / MANIFEST
    try:
        content = read_regular(path, MOST_MANIFEST_BYTES)
        recorded = read_regular(folder / MANIFEST_HASH)
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: {error.strerror or error} ({Path(error.filename or path).name}). A checkpoint "
            f"has {MANIFEST}, {MANIFEST_HASH} and the files that they name; without them the meaning of its bytes is unknown. "
            "Give the folder of a complete one (step_00001000), or restore the missing file."
        ) from None
    version = _format_version(content)
    if version is not None and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {version}; this Triaxis reads versions up to {FORMAT_VERSION}. Reading it anyway could "
            "misplace weights. Use the version of Triaxis that wrote it, or a newer one."
        )
    if recorded != _hash_line(content):
        raise CheckpointError(
            f"{path} does not have the sha256 that {MANIFEST_HASH} records: one of the two was damaged or edited, and the places "
            "of tensors in it cannot be trusted. Restore it from a copy, or load another checkpoint."
        )
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} is not a valid checkpoint manifest: {_first(error)}. Its hash matches, so it was written this way; it is not "
            "used. Load another checkpoint."
        ) from None


def _hash_line(content: bytes) -> bytes:
    """Return the content of manifest.sha256."""
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode()


def _format_version(content: bytes) -> int | None:
    """Find the format version near the start, without parsing the JSON. None: it is not there."""
    found = re.search(rb'"format_version"\s*:\s*(\d{1,9})\b', content[:4096])
    return int(found[1]) if found else None


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'the file'}: {first['msg']}"


def manifest_problems(folder: Path, manifest: Manifest) -> list[str]:
    """List what contradicts the manifest.

    Files must have their stated sizes, and pieces must lie inside their file and tensor. Each element must be saved exactly once
    per state kind (`Manifest.kinds_of`): weights, and for a trained tensor also moments and average.
    """
    problems = []
    pieces: dict[tuple[str, Kind], list[Piece]] = {}
    misplaced: set[tuple[str, Kind]] = set()
    for file in manifest.files:
        if (problem := _file_problem(folder / file.name, file.num_bytes)) is not None:
            problems.append(f"{file.name}: {problem}")
        for piece in file.pieces:
            if not _fits(piece, manifest.tensors.get(piece.name), file):
                problems.append(
                    f"{file.name}: {piece.kind}:{piece.name}@{piece.start} lies outside of its tensor or file"
                )
                misplaced.add((piece.name, piece.kind))
            pieces.setdefault((piece.name, piece.kind), []).append(piece)
    for name, tensor in manifest.tensors.items():
        for kind in manifest.kinds_of(tensor):
            mine, whole = pieces.get((name, kind), []), math.prod(tensor.shape)
            there = sum(piece.numel for piece in mine)
            if (name, kind) in misplaced:
                continue
            if there != whole:
                problems.append(f"{kind}:{name}: {there:,} elements saved of {whole:,}")
            elif _some_twice(mine):
                problems.append(f"{kind}:{name}: some elements are saved twice, so as many are missing")
    return problems


def _file_problem(path: Path, num_bytes: int) -> str | None:
    try:
        status = path.stat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_size != num_bytes:
        return f"{status.st_size:,} bytes on disk, {num_bytes:,} when it was written"
    return None


def _fits(piece: Piece, tensor: TensorInfo | None, file: DataFile) -> bool:
    return (
        tensor is not None
        and len(piece.box) == len(tensor.shape)
        and all(0 <= low < high <= size for (low, high), size in zip(piece.box, tensor.shape, strict=True))
        and piece.start < piece.stop <= math.prod(box_shape(piece.box))
        and piece.offset + piece.num_bytes <= file.num_bytes
    )


def _some_twice(pieces: Sequence[Piece]) -> bool:
    """Whether two pieces of one tensor share an element."""
    ranges: dict[Box, list[tuple[int, int]]] = {}
    for piece in pieces:
        ranges.setdefault(piece.box, []).append((piece.start, piece.stop))
    boxes: list[Box] = []
    for box, cuts in ranges.items():
        cuts.sort()
        edges = [0, *(edge for cut in cuts for edge in cut), math.prod(box_shape(box))]
        if all(stop == start for stop, start in zip(edges[::2], edges[1::2], strict=True)):
            boxes.append(box)
        else:
            boxes += [part for start, stop in cuts for part, _ in flat_boxes(box, start, stop)]
    return _some_meet(boxes)


def _some_meet(boxes: Sequence[Box]) -> bool:
    """Whether two of the boxes share an element."""
    cut = [dim for dim in range(len(boxes[0])) if len({box[dim] for box in boxes}) > 1]
    if len(cut) == 1:  # cut along one dim, as in tensor parallelism: comparing neighbours is fast for many ranks
        return any(stop > start for (_, stop), (start, _) in pairwise(sorted(box[cut[0]] for box in boxes)))
    return any(intersect(one, other) is not None for one, other in combinations(boxes, 2))


def _to_json(manifest: Manifest) -> str:
    """Format the manifest as JSON with one line per tensor and piece."""
    tree = manifest.model_dump(mode="json")
    files, tensors = tree.pop("files"), tree.pop("tensors")
    head = json.dumps(tree, indent=2, allow_nan=False).removesuffix("\n}")
    described = {
        name: {field: value for field, value in info.items() if (field, value) != ("is_trained", True)}
        for name, info in tensors.items()
    }
    tensor_lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(info)}" for name, info in described.items())
    file_texts = []
    for file in files:
        pieces = ",\n".join(f"      {json.dumps(piece)}" for piece in file["pieces"])
        file_texts.append(
            f'    {{"name": {json.dumps(file["name"])}, "num_bytes": {file["num_bytes"]}, "pieces": [\n{pieces}\n    ]}}'
        )
    return f'{head},\n  "tensors": {{\n{tensor_lines}\n  }},\n  "files": [\n' + ",\n".join(file_texts) + "\n  ]\n}\n"
