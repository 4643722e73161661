"""`triaxis verify` proves that a layout trains the same model as one process, or names the first difference."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.schema.training import MOST_STEPS
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import counted
from triaxis.engine.layout.rank_rules import MOST_RANKS as LARGEST_WORLD
from triaxis.launch.pictures.tables import terminal_table
from triaxis.launch.start.command_line import (
    CONFIG,
    LAYOUT_WORDS,
    CommandParser,
    above,
    add_dry_run,
    add_json,
    add_output,
    print_json,
    refuse,
)
from triaxis.launch.verify.covering import Row
from triaxis.launch.verify.matrix import MOST_RANKS, matrix
from triaxis.launch.verify.oracle import (
    NUM_STEPS,
    ORACLES,
    is_own,
    oracle_trial,
    show_oracle_plan,
    verify_against,
    what_is,
)
from triaxis.launch.verify.run import Trial, VerificationError, show_plan, trial, verify_layout
from triaxis.launch.verify.subject.run import (
    AXES,
    MOST_SECONDS,
    OURS,
    ReportError,
    named,
    subject_trial,
    verify_subject,
)
from triaxis.launch.verify.trial import layout_words
from triaxis.launch.verify.verdict.bounds import TOLERANCES, noise_factor
from triaxis.launch.verify.verdict.judge import Difference, Verdict

EXAMPLES = """examples:
  triaxis verify configs/gpt_tiny.yaml --layout tp=4,pp=2,vpp=2,dp=1
  triaxis verify configs/gpt_tiny.yaml --layout tp=2,dp=2,sp=false --full-size --steps 5 --output certificate.json
  triaxis verify configs/gpt_tiny.yaml model.num_kv_heads=2 --layout tp=4,dp=1
  triaxis verify --matrix
  triaxis verify configs/gpt_tiny.yaml --oracle megatron-core
  triaxis verify configs/gpt_tiny.yaml --oracle transformers --layout tp=2,pp=2 --dtype fp32

By default the model is made small and keeps every relation of its sizes: heads to ranks, layers to stages, padding of the
vocabulary, microbatches to stages. Runs on the GPUs of this machine, else on the CPU. Exit code 0: equal; 1: different;
2: this cannot be run. What verify starts goes to stderr, the certificate to stdout. An oracle runs on the CPU, in a process of
its own; without --layout, our one process and three layouts of 4 ranks are compared with it.
"""

SHOWN = 12
PIPE_WIDTH = 120
DEFAULT_STEPS = 3
ONE_PROCESS = "one process"
DTYPES = ("float64", "fp32", "bf16", "fp16")
EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2

Compared = tuple[Trial, Verdict, str, str]
"""A trial, its verdict, what it was compared with, and the words of its line."""


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "triaxis verify (CONFIG | --matrix) [--layout tp=N,pp=N,...] [options] [section.key=value ...]"
    parser.epilog = EXAMPLES
    parser.takes(CONFIG, "model and run to be verified", required=False)
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="tp=N,pp=N,...",
        help=f"of {', '.join(LAYOUT_WORDS)}; what is not named is 1 (sp: off). Default: the config's own layout; with --subject, "
        "layouts in which every two of its axes meet, and it can be given several times",
    )
    parser.add_argument(
        "--matrix",
        action="store_true",
        help="layouts, schedules and recomputation in which every two features meet, of the config's model or of built-in ones",
    )
    parser.add_argument(
        "--max-ranks",
        type=int,
        default=MOST_RANKS,
        metavar="N",
        help=f"of a layout in the matrix (default: {MOST_RANKS})",
    )
    parser.add_argument(
        "--oracle",
        type=_oracle,
        metavar="ORACLE",
        help="compare with another library's model, or FILE.py:FUNCTION of yours, in place of our own one process: "
        + "; ".join(f"{name}: {what}" for name, (_, what) in ORACLES.items()),
    )
    parser.add_argument(
        "--subject",
        type=Path,
        metavar="ADAPTER.py",
        help="judge another engine, which this file runs: its one process against its own layouts",
    )
    parser.add_argument(
        "--against",
        choices=(OURS, *ORACLES),
        help="with --subject: an engine that its one process is compared with too, before its layouts",
    )
    parser.add_argument(
        "--python", metavar="PATH", help="with --subject: the Python that runs the adapter (default: this one)"
    )
    parser.add_argument(
        "--timeout",
        type=int,
        metavar="SECONDS",
        help=f"with --subject: the longest run of an adapter (default: {MOST_SECONDS})",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="K",
        help=f"optimizer steps (default: {DEFAULT_STEPS}, with --oracle {NUM_STEPS})",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float64", help="of both runs (default: float64, where equal means equal)"
    )
    parser.add_argument("--full-size", action="store_true", help="the config's own sizes instead of small ones")
    add_dry_run(parser, "print both launch lines; start nothing")
    add_json(parser)
    add_output(parser)


def _oracle(word: str) -> str:
    if word not in ORACLES and not is_own(word):
        raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(ORACLES)}, and no FILE.py:FUNCTION")
    return os.path.normpath(Path.cwd() / word) if word.partition(":")[0].endswith(".py") else word


def run(args: argparse.Namespace) -> int:
    """Run the verification. The exit code is 0 if equal, 1 if different, 2 if it cannot be run."""
    if args.steps is None:
        args.steps = DEFAULT_STEPS if args.oracle is None else NUM_STEPS
    refuse(_problems(args))
    # A pipe has room for the names of another engine's parameters.
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    has_several = args.matrix or args.subject is not None or args.oracle is not None
    try:
        if args.matrix:
            return _run_matrix(console, args)
        if args.subject is not None:
            return _run_subject(console, args)
        return _run_layout(console, args) if args.oracle is None else _run_oracle(console, args)
    except (VerificationError, ReportError) as error:
        print(f"error: {error}; {'not everything' if has_several else 'nothing'} was compared", file=sys.stderr)
        return UNUSABLE


def _run_layout(console: Console, args: argparse.Namespace) -> int:
    """Compare one layout with one process, and print the certificate."""
    layout = _layout_words(args) or []
    asked = trial(
        args.config,
        (*args.overrides, *layout),
        small=not args.full_size,
        num_steps=args.steps,
        dtype=args.dtype,
    )
    if args.dry_run:
        show_plan(asked)
        print_json(args, planned([asked]), args.output)
        return EQUAL
    verdict = verify_layout(asked)
    show_certificate(console, asked, verdict)
    if asked.config.model.own.loss is not None and not args.full_size:
        console.print(
            f"[yellow]ids are below {asked.config.model.vocab_size} and samples have {asked.config.model.seq_length} tokens[/]: "
            "larger ids and longer samples were not tried with your loss; --full-size tries them"
        )
    print_json(args, certificate(asked, verdict), args.output)
    return EQUAL if verdict.equal else DIFFERENT


def _layout_words(args: argparse.Namespace) -> list[str] | None:
    """The layout as overrides; None if --layout is not given."""
    return layout_words(args.config, args.overrides, args.layout[0]) if args.layout else None


def _problems(args: argparse.Namespace) -> Iterator[str]:
    if args.steps < 1:
        yield f"--steps {args.steps}: must be at least 1, or nothing would be compared."
    yield from above("steps", args.steps, MOST_STEPS, "no run makes more")
    if args.config is None and not args.matrix:
        yield "neither a config nor --matrix: nothing says what to verify. Give a config, or --matrix for built-in models."
    if args.config is None and args.overrides:
        yield f"{args.overrides[0]}: without a config there is nothing to override."
    if args.matrix and (args.layout or args.full_size):
        yield "--matrix chooses layouts and uses small sizes: --layout and --full-size would be ignored. Leave them out."
    if args.matrix and args.oracle is not None:
        yield "--matrix compares with our own one process: --oracle would be ignored. Leave one of them out."
    if args.subject is not None and (args.matrix or args.oracle is not None or args.full_size):
        yield "--subject runs another engine in small sizes: --matrix, --oracle and --full-size are for ours. Leave them out."
    if args.subject is None and len(args.layout) > 1:
        yield f"--layout {' --layout '.join(args.layout)}: one layout is verified, unless --subject is given. Leave one."
    for name, given in (("python", args.python), ("against", args.against), ("timeout", args.timeout)):
        if args.subject is None and given is not None:
            yield f"--{name} {given}: it is for the adapter of --subject, and would be ignored. Leave it out."
    if args.subject is not None and args.dtype not in TOLERANCES:
        yield f"--dtype {args.dtype} with --subject: no rounding of it is known. Give one of {', '.join(TOLERANCES)}."
    if args.timeout is not None and args.timeout < 1:
        yield f"--timeout {args.timeout}: must be at least 1 second, or no run could finish."
    if args.max_ranks < 2:
        yield f"--max-ranks {args.max_ranks}: must be at least 2; a layout of one rank is the reference itself."
    yield from above("max_ranks", args.max_ranks, LARGEST_WORLD, "no run has more ranks")


def _run_matrix(console: Console, args: argparse.Namespace) -> int:
    """Run the trials, and print a line for each as soon as it is decided. A trial that cannot run ends the matrix."""
    trials = matrix(
        args.config, tuple(args.overrides), num_steps=args.steps, dtype=args.dtype, most_ranks=args.max_ranks
    )
    if args.dry_run:
        for _, asked in trials:
            show_plan(asked)
        print_json(args, planned([asked for _, asked in trials]), args.output)
        return EQUAL
    certificates = _judge(console, _of_matrix(trials), len(trials))
    num_different = sum(not one["equal"] for one in certificates)
    in_matrix = [{"features": row} | one for (row, _), one in zip(trials, certificates, strict=True)]
    print_json(args, {"equal": not num_different, "trials": in_matrix}, args.output)
    steps = counted(args.steps, "step")
    if num_different:
        console.print(f"[bold red]{num_different} of {len(trials)} layouts do not train the same model.[/]")
        return DIFFERENT
    console.print(
        f"[bold green]equal[/]: all {len(trials)} layouts train the same models as one process ({steps} in {args.dtype}). Every "
        "two features that can be combined are in one of them."
    )
    return EQUAL


def _of_matrix(trials: Sequence[tuple[Row, Trial]]) -> Iterator[Compared]:
    for row, asked in trials:
        print(f"{_features(row)} ...", file=sys.stderr)
        yield asked, verify_layout(asked), ONE_PROCESS, _features(row)


def _judge(console: Console, compared: Iterator[Compared], total: int | None) -> list[dict[str, object]]:
    """Print each verdict as soon as it is there, and return the certificates.

    A verdict is one of `total` lines, and for a difference also tables. If `total` is None, it is a whole certificate.
    """
    certificates = []
    for number, (one, verdict, against, words) in enumerate(compared, start=1):
        if total is None:
            show_certificate(console, one, verdict, against)
        else:
            _show_line(console, number, total, verdict, words)
            if not verdict.equal:
                _show_tables(console, one, verdict, against)
        certificates.append(certificate(one, verdict, against))
    return certificates


def _run_oracle(console: Console, args: argparse.Namespace) -> int:
    """Compare one process and each layout with another library (the oracle), and print the verdicts."""
    asked = oracle_trial(
        args.config,
        args.overrides,
        oracle=args.oracle,
        layout=_layout_words(args),
        small=not args.full_size,
        num_steps=args.steps,
        dtype=args.dtype,
    )
    if args.dry_run:
        show_oracle_plan(asked)
        print_json(args, planned(asked.trials, asked.against), args.output)
        return EQUAL
    compared = ((one, verdict, asked.against, "") for one, verdict in verify_against(asked))
    certificates = _judge(console, compared, None)
    is_equal = all(one["equal"] for one in certificates)
    oracle = {"name": asked.oracle, "version": asked.version, "what": what_is(asked.oracle)}
    print_json(args, {"equal": is_equal, "oracle": oracle, "trials": certificates}, args.output)
    return EQUAL if is_equal else DIFFERENT


def _run_subject(console: Console, args: argparse.Namespace) -> int:
    """Verify another engine's layouts. Print a line for each comparison, and its error tables if it shows a difference."""
    asked = subject_trial(
        args.config,
        args.overrides,
        adapter=args.subject,
        python=args.python or sys.executable,
        layouts=args.layout,
        against=args.against,
        num_steps=args.steps,
        dtype=args.dtype,
        most_seconds=args.timeout or MOST_SECONDS,
    )
    if args.dry_run:
        console.print("\n".join(f"{asked.python} {args.subject} in {_layout(one.config)}" for one in asked.trials))
        print_json(args, planned(asked.trials), args.output)
        return EQUAL
    console.print(f"subject {args.subject}: {_model(asked.trials[0].config)}", markup=False)
    num_trials = len(asked.trials) + bool(asked.against)
    if asked.against:
        console.print(
            f"the engine of --against ({' '.join(asked.against)}) runs first, in one process; its log goes to standard error",
            style="dim",
        )
    compared = (
        (
            one,
            verdict,
            against,
            f"{named({axis: parallel_sizes(one.config).size(axis) for axis in AXES})} against {against}",
        )
        for one, verdict, against in verify_subject(asked)
    )
    certificates = _judge(console, compared, num_trials)
    num_different = sum(not one["equal"] for one in certificates)
    print_json(args, {"equal": not num_different, "subject": str(args.subject), "trials": certificates}, args.output)
    if num_different:
        console.print(f"[bold red]{num_different} of {num_trials} comparisons show a difference.[/]")
        return DIFFERENT
    console.print(
        f"[bold green]equal[/]: all of {counted(num_trials, 'comparison')} ({counted(args.steps, 'step')} in {args.dtype})."
    )
    return EQUAL


def _show_line(console: Console, number: int, total: int, verdict: Verdict, words: str) -> None:
    """Print one verdict as a line with its largest error, then the cause of a difference."""
    largest = max(error for error, _ in verdict.largest.values())
    answer = "[green]equal[/]    " if verdict.equal else "[bold red]different[/]"
    console.print(f"{number:>4}/{total}  {answer}  {largest:.1e}  {words}")
    if not verdict.equal:
        _show_cause(console, verdict)


def _features(row: Row) -> str:
    sizes = " ".join(f"{size} {row[size]}" for size in ("tp", "cp", "pp", "vpp", "dp") if row[size] != 1)
    words = [sizes, "sp" if row["sp"] else "", str(row["schedule"]) if row["schedule"] != "auto" else ""]
    words += [f"{row['recompute']} recompute" if row["recompute"] != "none" else ""]
    words += [f"experts {row['experts']}" if row["experts"] != "whole" else ""]
    words += [f"micro batch {row['micro batch']}" if row["micro batch"] != 1 else ""]
    return f"{row['model']}: " + ", ".join(word for word in words if word)


def certificate(asked: Trial, verdict: Verdict, against: str = ONE_PROCESS) -> dict[str, object]:
    """Build the verdict as JSON, with the largest errors and the config that reproduces the runs."""
    return {
        "equal": verdict.equal,
        "layout": _layout(asked.config),
        "against": against,
        "steps": asked.config.train.steps,
        "dtype": asked.config.precision.dtype,
        "tolerance": asked.tolerance if asked.noise is None else None,
        "largest_error_of_its_bound": verdict.of_bound,
        "largest_errors": {what: {"error": error, "name": name} for what, (error, name) in verdict.largest.items()},
        "differences": [asdict(one) for one in verdict.differences],
        "likely_cause": None if verdict.cause is None else asdict(verdict.cause),
        "reference_steps": [asdict(step) for step in verdict.reference],
        "config": asked.config.model_dump(mode="json"),
    }


def planned(trials: Sequence[Trial], against: str = ONE_PROCESS) -> dict[str, object]:
    """Build a dry run's JSON, with the layouts that would be compared and each run's config."""
    return {
        "against": against,
        "trials": [{"layout": _layout(one.config), "config": one.config.model_dump(mode="json")} for one in trials],
    }


def _layout(config: Config) -> str:
    sp = " sp" if config.parallel.sequence_parallel else ""
    return f"{parallel_sizes(config)}{sp}"


def show_certificate(console: Console, asked: Trial, verdict: Verdict, against: str = ONE_PROCESS) -> None:
    """Print for people what was compared, then the verdict."""
    _show_tables(console, asked, verdict, against)
    if verdict.equal:
        console.print("[bold green]equal[/]: this layout trains the same model.")
    else:
        _show_cause(console, verdict)


def _show_cause(console: Console, verdict: Verdict) -> None:
    assert verdict.cause is not None
    axis = "" if verdict.cause.axis is None else f" [bold]{verdict.cause.axis}[/]:"
    console.print(f"likely cause:{axis} {verdict.cause.text}.")


def _show_tables(console: Console, asked: Trial, verdict: Verdict, against: str = ONE_PROCESS) -> None:
    """Print the largest error for each kind of tensor, notes, and the tensors that differ."""
    config, model = asked.config, asked.config.model
    assert config.train.steps is not None, "a trial has its length in steps"
    if model.extension is not None:
        console.print(f"extension {model.extension}")
    title = f"{_layout(config)} against {against}: {counted(config.train.steps, 'step')} in {config.precision.dtype}"
    table = terminal_table("compared", "largest error", "of", names=("compared", "of"), title=title)
    wrong = {one.what for one in verdict.differences}
    for what, (error, name) in verdict.largest.items():
        table.add_row(what, f"{error:.1e}", name, style="bold red" if what in wrong else "")
    console.print(table)
    console.print(_model(config), style="dim")
    console.print(
        f"error: |difference| / the tensor's norm (or the RMS norm of its kind, if larger); {_rounding(asked)} is rounding",
        style="dim",
    )
    if "routing" in verdict.largest and asked.noise is not None:
        share, layer = verdict.largest["routing"]
        console.print(
            f"at most {share:.2%} of a layer's expert choices ({layer}) differed by rounding, which is no error; the "
            "runs continued with the choices of one process",
            style="dim",
        )
    clip = config.optimizer.clip_grad
    unclipped = [step.grad_norm for step in verdict.reference if clip is None or step.grad_norm <= clip]
    if unclipped:
        console.print(
            f"[yellow]clipping was not at work[/] in {len(unclipped)} of {counted(len(verdict.reference), 'step')}: "
            f"the gradient norm was at most {max(unclipped):.3g}, and {clip} is the limit; verify could not see an "
            "error in it",
        )
    if not verdict.equal:
        _show_differences(console, verdict.differences, against)


def _model(config: Config) -> str:
    """Describe the model and its batch in one line."""
    model = config.model
    kv = f" ({model.kv_heads} kv)" if model.kv_heads != model.num_attention_heads else ""
    experts = "" if model.moe is None else f"{model.moe.num_experts} experts (a token has {model.moe.top_k}), "
    return (
        f"{model.num_layers} layers, h {model.hidden_size}, {model.num_attention_heads} heads{kv}, {experts}"
        f"vocabulary {model.vocab_size} (padded {model.padded_vocab_size}), sequence {model.seq_length}; "
        f"global batch {config.train.global_batch_size}, micro batch {config.train.micro_batch_size}"
    )


def _rounding(asked: Trial) -> str:
    """Describe the error bound in words."""
    if asked.noise is None:
        return f"at most {asked.tolerance:g}"
    dtype, wider = asked.config.precision.dtype, asked.noise.precision.dtype
    factor = noise_factor(asked.config.parallel.tp)
    return f"at most {factor:.2g} times the distance of one process in {dtype} from itself in {wider}"


def _show_differences(console: Console, differences: Sequence[Difference], against: str) -> None:
    first = differences[0]
    console.print(f"[bold red]different[/], first in step {first.step + 1}, {first.what}:")
    table = terminal_table("name", against, "layout", "factor", "error", names=("name",))
    for one in differences[:SHOWN]:
        factor = "" if one.factor is None else f"{one.factor:.6g}"
        table.add_row(one.name or one.what, f"{one.wanted:.6g}", f"{one.got:.6g}", factor, f"{one.error:.1e}")
    console.print(table)
    if len(differences) > SHOWN:
        console.print(f"and {len(differences) - SHOWN} more", style="dim")
