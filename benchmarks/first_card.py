"""What to run first on a machine with a GPU: pieces of minutes, a record of each, and one block to paste.

    piece      --a process-->  FOLDER/<piece>.log, a line of records.jsonl, rows of gpu.jsonl (`benchmarks.gpu`), node.json (doctor)
    records    -->             the block

`first_card.sh` is the command. A piece with a record is not run again; one that was cut off has none. Tests and parity come first,
because the speed of an engine that computes something else means nothing.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu import ROOT, commit, end, environment, interrupted
from benchmarks.gpu_contenders.contenders import CONTENDERS, GRAPHS, OURS
from benchmarks.gpu_contenders.records import append, newest, read
from benchmarks.gpu_contenders.shapes import SHAPES as BY_NAME
from benchmarks.gpu_contenders.tables import best, one_line
from triaxis.engine.device.gpus import CPU, CUDA, DEVICE_VARIABLE, find_gpus
from triaxis.engine.telemetry.record.peaks import known_peak

COMMAND = "bash benchmarks/first_card.sh"
RECORDS, ROWS, NODE = "records.jsonl", "gpu.jsonl", "node.json"
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
SHAPES = {CUDA: ("gpt-1.3b", "gpt-2.7b", "llama-8b-4k-12l", "llama-8b-8k-12l"), CPU: ("tiny",)}
TOY = ("--steps", "2", "--warm-up", "1", "--ceiling-size", "64", "--ceiling-seconds", "0")
"""Words of `benchmarks.gpu` for shapes that show only that everything runs: their speeds mean nothing."""
LAYOUTS = {2: "tp=2", 4: "tp=2,pp=2", 8: "tp=2,pp=2,vpp=2,dp=2"}
"""GPUs -> the first layout that is verified on them."""
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Piece:
    """Something to run, useful alone.

    Attributes:
        name: of its record.
        what: it shows.
        minutes: that it may take; then it is ended, and has failed.
        command: words of its process.
        least_gpus: that it needs.
        wants: shape and contender of a row, without whose numbers it has failed.
    """

    name: str
    what: str
    minutes: int
    command: tuple[str, ...]
    least_gpus: int = 0
    wants: tuple[str, str] | None = None


def pieces(num_gpus: int, folder: Path, shapes: Sequence[str] = ()) -> Iterator[Piece]:
    """Yield the pieces, what matters most first.

    Args:
        num_gpus: that torch can use; 0: a CPU, whose speeds are those of a toy.
        folder: of the records.
        shapes: whose speeds are measured; none: those of the device.
    """
    triaxis = (sys.executable, "-m", "triaxis.launch.cli")
    pytest = (sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow")
    yield Piece("doctor", "card, driver, versions", 5, (*triaxis, "doctor", "--output", str(folder / NODE)))
    yield Piece("gpu-tests", "kernels, memory, streams", 40, (*pytest, "tests", "--ignore=tests/parity"), 1)
    yield Piece("parity", "float64 against plain PyTorch; ranks share a card", 40, (*pytest, "tests/parity"), 1)
    ranks = max(size for size in LAYOUTS if size <= max(num_gpus, 2))
    verify = (*triaxis, "verify", "configs/gpt_tiny.yaml", "--layout", LAYOUTS[ranks])
    yield Piece("layout", f"{LAYOUTS[ranks]} against one process", 10, verify, 2 if num_gpus else 0)
    matrix = (*triaxis, "verify", "--matrix", "--max-ranks", str(ranks))
    yield Piece("matrix", "every two features against one process, over NCCL", 90, matrix, 2)
    device = CUDA if num_gpus else CPU
    able = [name for name, one in CONTENDERS.items() if one.runs_on(device, "bf16")]
    for kind, what, minutes, names in (
        ("speed", "ours, and with CUDA graphs", 15, [OURS, *([GRAPHS] if device == CUDA else [])]),
        ("peers", "ours beside others", 45, [name for name in able if not CONTENDERS[name].has_fp8]),
        ("fp8", "FP8, ours and others", 45, [name for name in able if CONTENDERS[name].has_fp8]),
    ):
        for shape in shapes or SHAPES[device]:
            words = ("--device", device, "--shapes", shape, "--contenders", *names)
            words += TOY if shape.startswith("tiny") else ()
            kept = ("--results", str(folder / ROWS), "--logs", str(folder / "gpu"))
            command = (sys.executable, "-m", "benchmarks.gpu", *words, *kept)
            yield Piece(f"{kind}-{shape}", f"tokens/s of {shape}: {what}", minutes, command, wants=(shape, names[0]))


def run_piece(piece: Piece, num_gpus: int, folder: Path) -> dict[str, Any]:
    """Run a piece where it can run here, add its record to the folder and return it."""
    started = time.monotonic()
    if num_gpus < piece.least_gpus:
        status, said = NOT_RUN, f"needs {piece.least_gpus} or more GPUs, and torch finds {num_gpus}"
    else:
        status, said = _outcome(piece, folder, _exit_code(piece, num_gpus, folder))
    record = {
        "piece": piece.name,
        "status": status,
        "said": one_line(said),
        "seconds": round(time.monotonic() - started),
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(piece.command),
    }
    append(folder / RECORDS, record)
    return record


def _exit_code(piece: Piece, num_gpus: int, folder: Path) -> int | None:
    """Return the exit code of a piece's process; None: it took too long. What it started ends with it."""
    variables = {name: value for name, value in environment().items() if name != DEVICE_VARIABLE}
    hidden = {} if num_gpus else {"CUDA_VISIBLE_DEVICES": ""}
    folder.mkdir(parents=True, exist_ok=True)
    with _log(piece, folder).open("w") as log:
        process = subprocess.Popen(
            piece.command, cwd=ROOT, env=variables | hidden, stdout=log, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            return process.wait(60 * piece.minutes)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def _outcome(piece: Piece, folder: Path, code: int | None) -> tuple[str, str]:
    """Return the status of a piece that has ended, and its last words."""
    lines = [line for line in _log(piece, folder).read_text(errors="replace").splitlines() if line.strip()]
    said = lines[-1] if lines else "it printed nothing"
    if code is None:
        return (
            FAILED,
            f"took more than {piece.minutes} minutes ({COMMAND} --only {piece.name} tries again); it said last: {said}",
        )
    if piece.wants is None or code != 0:
        return PASSED if code == 0 else FAILED, said
    rows = newest(read(folder / ROWS)).values()
    row = next(row for row in rows if (row["shape"], row["contender"]) == piece.wants)
    return (PASSED, "see the speeds") if row["status"] == "measured" else (FAILED, row["reason"])


def _log(piece: Piece, folder: Path) -> Path:
    return folder / f"{piece.name}.log"


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the newest record of each piece, by its name."""
    return {record["piece"]: record for record in read(folder / RECORDS)}


def block(folder: Path) -> str:
    """Format the records of a folder as the block to paste: card, versions, verdicts, speeds."""
    records, rows = recorded(folder), list(newest(read(folder / ROWS)).values())
    path = folder / NODE
    node = json.loads(path.read_text())["ranks"][0] if path.is_file() else {"equal": {}, "packages": []}
    facts, packages = node["equal"], {one["name"]: one for one in node["packages"]}
    name = facts.get("GPU", "no GPU: a try on a CPU" if facts else f"not known yet: {COMMAND} --only doctor")
    card = [name, *(f"{key} {facts[key]}" for key in ("GPU memory", "driver", "CUDA", "NCCL") if key in facts)]
    found = [f"python {facts['python']}"] if facts else []
    found += [f"{one} {_version(packages[one])}" for one in packages]
    lines = [
        ("card", ", ".join(card)),
        ("commit", ", ".join(dict.fromkeys(record["commit"] or "unknown" for record in records.values()))),
        ("versions", ", ".join(found)),
        *((one, f"{record['status']}: {record['said']}") for one, record in records.items()),
        *_speeds(rows, facts.get("GPU", "")),
    ]
    width = max(len(label) for label, _ in lines)
    return "\n".join(["```text", *(f"{label:<{width}}  {text}".rstrip() for label, text in lines), "```"])


def _version(package: Mapping[str, str]) -> str:
    found = package["version"] or "not found"
    return f"{found} (not usable: {package['problem']})" if package["problem"] else found


def _speeds(rows: Sequence[Mapping[str, Any]], gpu: str) -> Iterator[tuple[str, str]]:
    """Yield a line per row, shape by shape: the speed, MFU, share of a large GEMM, and ours over it; or why there is none."""
    for shape in dict.fromkeys(row["shape"] for row in rows):
        here = [row for row in rows if row["shape"] == shape]
        measured = [row for row in here if row["status"] == "measured"]
        ours = {fp8: best(row for row in measured if _is_ours(row, fp8)) for fp8 in (False, True)}
        for row in here:
            if row["status"] != "measured":
                yield f"{shape} {row['contender']}", f"not measured: {one_line(row['reason'])}"
                continue
            fp8 = CONTENDERS[row["contender"]].has_fp8
            peak, beside = known_peak(gpu, row["dtype"], in_fp8=fp8), ours[fp8]
            words = [f"{row['tokens_per_second']:,.0f} tokens/s", f"micro batch {row['micro_batch_size']}"]
            words += [f"MFU {row['model_tflops_causal'] / peak.tflops:.1%}"] if peak else []
            words += [f"r {row['r']:.3f}"]
            if beside is not None and not CONTENDERS[row["contender"]].is_ours:
                words.append(f"ours / it {beside['tokens_per_second'] / row['tokens_per_second']:.3f}")
            elif fp8 and ours[False] is not None:
                words.append(f"over bf16 {row['tokens_per_second'] / ours[False]['tokens_per_second']:.3f}")
            yield f"{shape} {row['contender']}", ", ".join(words)


def _is_ours(row: Mapping[str, Any], fp8: bool) -> bool:
    one = CONTENDERS[row["contender"]]
    return one.is_ours and one.has_fp8 == fp8


def main(argv: Sequence[str]) -> int:
    """Run the pieces that have no record, then print the block; return the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="What to run first on a machine with a GPU.")
    parser.add_argument("--list", action="store_true", help="print pieces, their most minutes and records; run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="run these pieces, recorded or not")
    parser.add_argument("--block", action="store_true", help="print the block of what is recorded; run nothing")
    parser.add_argument(
        "--folder", type=Path, help="of the records; default: runs/first_card, on a CPU runs/first_card_cpu"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="NAME",
        choices=list(BY_NAME),
        default=[],
        help=f"whose speeds are measured; default: {', '.join(SHAPES[CUDA])}; tiny: everything runs, in minutes",
    )
    options = parser.parse_args(argv)
    gpus, on_cpu = find_gpus(os.environ), os.environ.get(DEVICE_VARIABLE) == CPU
    num_gpus = 0 if on_cpu else gpus.count
    folder = (options.folder or ROOT / "runs" / ("first_card_cpu" if on_cpu else "first_card")).resolve()
    listed = list(pieces(num_gpus if on_cpu else max(num_gpus, 1), folder, options.shapes))
    had = recorded(folder)
    if unknown := set(options.only) - {piece.name for piece in listed}:
        parser.error(
            f"--only {' '.join(sorted(unknown))}: the pieces here are {', '.join(piece.name for piece in listed)}"
        )
    if options.list:
        for piece in listed:
            status = had[piece.name]["status"] if piece.name in had else ""
            needs = f", needs {piece.least_gpus} or more GPUs" if piece.least_gpus else ""
            print(f"{piece.name:<22} {piece.minutes:>3} min  {status:<8} {piece.what}{needs}")
        return 0
    if not options.block:
        if not (num_gpus or on_cpu):
            print(f"torch finds no GPU here, and nothing was run. {gpus.problem or gpus.note}".strip(), file=sys.stderr)
            print(f"What a CPU can run: {DEVICE_VARIABLE}={CPU} {COMMAND}", file=sys.stderr)
            return 2
        _run_all(
            [piece for piece in listed if not options.only or piece.name in options.only], options, num_gpus, folder
        )
        print("\nPaste this into an issue of the project:\n")
    print(block(folder))
    return int(any(recorded(folder).get(piece.name, {}).get("status") == FAILED for piece in listed))


def _run_all(wanted: Sequence[Piece], options: argparse.Namespace, num_gpus: int, folder: Path) -> None:
    for piece in wanted:
        record = recorded(folder).get(piece.name)
        if record is not None and record["status"] != NOT_RUN and not options.only:
            print(f"{piece.name}: recorded, {record['status']}", flush=True)
            continue
        if num_gpus >= piece.least_gpus:
            print(f"{piece.name}: {piece.what}; at most {piece.minutes} minutes, {_log(piece, folder)}", flush=True)
        record = run_piece(piece, num_gpus, folder)
        print(f"{piece.name}: {record['status']} ({record['seconds']} s): {record['said']}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupted)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on with the piece that was cut off", file=sys.stderr)
        sys.exit(INTERRUPTED)
