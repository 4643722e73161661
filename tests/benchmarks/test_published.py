"""Predictions against published runs: the errors that are claimed, and tables that lack something."""

import csv
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published.__main__ import RUNS, main
from benchmarks.published.compare import RESOLUTION, Comparison, Interval, Pair, Row, compare, held_bytes, lines
from benchmarks.published.losses import losses
from benchmarks.published.runs import COLUMNS, Run, device_of, read_runs, setup_of
from benchmarks.published.software import MEGATRON_2021, NEMO
from benchmarks.published.standing import CLOSE, standings
from triaxis.engine.errors import ConfigError
from triaxis.models.predict.step_time.estimate import PUBLISHED_OVER_PREDICTED
from triaxis.models.predict.step_time.implementation import OURS

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ROW = {
    "source": "NVIDIA/dgxc-benchmarking",
    "model": "Llama-3.1-8B",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "seq": "8192",
    "vocab": "128256",
    "gpus": "8",
    "gpu_type": "H100-80GB-SXM",
    "tp": "1",
    "pp": "1",
    "vpp": "1",
    "cp": "2",
    "ep": "1",
    "dp": "4",
    "micro_batch": "1",
    "global_batch": "128",
    "recompute": "none",
    "dtype": "bf16",
    "step_time_s": "10",
}
"""A run that is predicted; tests change what they are about."""


def table(path: Path, *rows: Mapping[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
    """Write a table of runs."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows({**ROW, **row} for row in rows)
    path.write_text(text.getvalue())
    return path


def only(path: Path, **changes: str) -> Row:
    """Validate a table of three rows with the same changes, and return the first."""
    found = compare(table(path / "runs.csv", *[changes] * 3))
    assert len({(row.unscored, row.error) for row in found.rows}) == 1
    return found.rows[0]


@pytest.fixture(scope="module")
def published() -> Comparison:
    return compare(RUNS)


def test_published_runs_are_predicted_within_the_claimed_errors(published: Comparison) -> None:
    """docs/footprint.md has the errors, and says where the model is wrong."""
    assert published.num_timed == 44
    assert len(published.scored) >= 0.8 * published.num_timed
    assert published.mean <= 0.05
    others = [row for row in published.scored if row.predicted and row.predicted.implementation is not MEGATRON_2021]
    assert max(abs(row.error or 0.0) for row in others) <= RESOLUTION
    assert published.worst <= 0.13, "of the oldest software, for which the same rates stand"
    beyond = next(line for line in lines(published) if line.startswith("beyond 12 %: "))
    assert beyond.startswith("beyond 12 %: line 19 GPT-76.1B (Megatron-LM 2021); other software: mean ")


def test_published_layouts_and_sweeps_are_in_order(published: Comparison) -> None:
    assert published.pairs and sum(pair.is_in_order for pair in published.pairs) >= 0.9 * len(published.pairs)
    assert published.sweeps and all(pair.is_in_order for pair in published.sweeps)
    sweep = [row for row in published.scored if "SC21 T2" in row.run.words["source"]]
    fewer, more = (sorted(sweep, key=lambda row: (row.run.name, row.run.numbers["gpus"]))[place] for place in (0, 1))
    assert fewer.run.name == more.run.name
    assert Pair(fewer, more).is_in_order, "fewer GPUs train more tokens each, also where published speeds hardly differ"


def test_rows_that_are_not_scored_say_what_they_lack(published: Comparison) -> None:
    unscored = {row.run.line: row.unscored for row in published.rows if not row.is_scored}
    assert all(unscored.values())
    assert sum("of 3 timed rows" in reason for reason in unscored.values()) == 4, "A100 (twice), B200, GB200"
    assert any("lacks step_time_s" in reason for reason in unscored.values())
    report = list(lines(published))
    assert report[-1] == f"mean {published.mean:.1%} worst {published.worst:.1%} rows 40 of 44".replace("%", " %")
    assert sum(line.startswith("calibration ") for line in report) == 3
    assert any("micro_batch, recompute: " in line for line in report), "what was searched, and over how many values"


def test_the_stated_interval_covers_software_that_it_does_not_know(published: Comparison) -> None:
    found = Interval.of(published.scored)
    assert (round(found.low, 2), round(found.high, 2)) == PUBLISHED_OVER_PREDICTED
    assert found.num_held >= 0.85 * found.num_rows


@pytest.mark.parametrize(
    ("changes", "lack"),
    [
        ({"layers": ""}, "lacks layers"),
        ({"layers": "many"}, "layers = 'many' is no positive whole number"),
        ({"hidden": "-4"}, "hidden = '-4'"),
        ({"heads": "9" * 40}, "heads = "),
        ({"vpp": "some"}, "vpp = 'some'"),
        ({"step_time_s": "nan"}, "step_time_s = 'nan' is no positive number"),
        ({"step_time_s": "fast"}, "step_time_s = 'fast'"),
        ({"gpu_type": "TPUv5"}, "a calibrated device for 'TPUv5'"),
        ({"gpu_type": "A100-40GB"}, "a calibrated device for 'A100-40GB'"),
        ({"ep": "8"}, "experts"),
        ({"model": "Mixtral-8x7B"}, "experts"),
        ({"recompute": "perhaps"}, "recompute = 'perhaps'"),
        ({"dtype": "int4"}, "a rate for dtype 'int4'"),
        ({"source": "somebody's laptop"}, "a record of the software"),
        ({"dp": "3"}, "tp x pp x cp x dp = 6 is not gpus = 8"),
        ({"dp": "", "tp": "3"}, "gpus = 8 is no multiple of tp x pp x cp = 6"),
        ({"ffn": "", "vocab": ""}, "vocab; ffn"),
        ({"heads": "33"}, "a shape that can be: model.hidden_size"),
        ({"seq": "3", "tp": "4", "cp": "1", "dp": "2"}, "model.seq_length must be a multiple"),
        ({"gpus": "8000000", "dp": "4000000", "global_batch": "4000000"}, "a shape that can be: parallel"),
        ({"micro_batch": "3"}, "train.global_batch_size must be a multiple"),
        ({"cp": "1", "dp": "", "pp": "8", "vpp": "5"}, "model.num_layers"),
        ({"gpus": "12", "cp": "1", "dp": "12"}, "lacks a cluster: 12 devices do not fill nodes of 8"),
        ({"step_time_s": ""}, "lacks step_time_s or tokens_per_s_per_gpu"),
        (
            {"hidden": "32768", "ffn": "131072", "micro_batch": ""},
            "lacks a value of micro_batch that is predicted to fit",
        ),
    ],
)
def test_a_row_that_cannot_be_predicted_is_listed(tmp_path: Path, changes: dict[str, str], lack: str) -> None:
    row = only(tmp_path, **changes)
    assert lack in row.unscored and not row.is_scored
    assert any(lack in line for line in lines(Comparison((row,))))


def test_a_table_that_is_none_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    with pytest.raises(ConfigError, match=r"columns gpus, note missing.*The header is source,model"):
        read_runs(table(path, {}, columns=tuple(name for name in COLUMNS if name not in ("gpus", "note"))))
    for content, words in (
        (b"", "columns source, model"),
        (",".join(COLUMNS).encode(), "no row below its header"),
        (",".join((*COLUMNS, "tp")).encode() + b"\n1", "column tp stands there twice"),
        (b"\xff\xfe\x00", "no text in UTF-8"),
        (",".join(COLUMNS).encode() + b'\n"' + b"x" * 200_000, "it is no CSV file"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            read_runs(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_runs(tmp_path / "none.csv")
    path.write_text(",".join(COLUMNS) + "\na,b\n")
    assert "it has 2 cells below 26 columns" in read_runs(path)[0].lacks[0]


def test_a_row_alone_of_its_gpu_type_is_predicted_and_not_scored(tmp_path: Path) -> None:
    found = compare(table(tmp_path / "runs.csv", {}))
    assert list(lines(found))[-1] == "rows 0 of 1"
    row = found.rows[0]
    assert row.unscored == "GPU type H100-80GB-SXM has 1 of 3 timed rows"
    assert row.error is not None and any("not scored" in line for line in lines(Comparison((row,))))


def test_times_come_from_tokens_where_there_are_none(tmp_path: Path) -> None:
    """128 samples of 8,192 tokens on 8 GPUs at 13,107.2 tokens per second each: 10 s."""
    row = only(tmp_path, step_time_s="", tokens_per_s_per_gpu="13107.2")
    assert row.run.seconds == pytest.approx(10) and row.is_scored


def test_open_columns_are_searched_over_what_fits_and_is_hardly_slower(tmp_path: Path) -> None:
    given = only(tmp_path).predicted
    row = only(tmp_path, micro_batch="", recompute="")
    assert given is not None and row.predicted is not None and row.is_scored
    assert given.low == given.high and not given.searched
    assert row.predicted.searched.startswith("micro_batch, recompute: ")
    assert row.predicted.low < row.predicted.seconds < row.predicted.high < (1.01 + RESOLUTION) * row.predicted.low
    assert row.predicted.seconds == (row.predicted.low + row.predicted.high) / 2
    larger = only(tmp_path, micro_batch="32", recompute="none").run
    assert held_bytes(*setup_of(larger).choices[0], NEMO, {}) > 85e9, "a value that does not fit"


def test_what_only_this_engine_refuses_is_predicted(tmp_path: Path) -> None:
    """Recomputing attention alone with cp, and microbatches that do not come in rounds of pp."""
    assert only(tmp_path, recompute="selective").is_scored
    assert only(tmp_path, cp="1", dp="1", pp="8", vpp="2", global_batch="12").is_scored


def test_shards_of_the_software_count_in_memory(tmp_path: Path) -> None:
    config, sizes = setup_of(only(tmp_path).run).choices[0]
    fsdp = setup_of(_fsdp(tmp_path)).implementation
    sharded, zero, whole = (held_bytes(config, sizes, how, {}) for how in (fsdp, OURS, MEGATRON_2021))
    assert sharded < zero < whole


def _fsdp(path: Path) -> Run:
    run = only(path, source="NVIDIA-NeMo/Megatron-Bridge", note="FSDP=8").run
    assert setup_of(run).implementation.shards == "parameters"
    return run


def test_gpu_types_find_their_device() -> None:
    for word in ("A100", "A100-80GB-SXM", "A100-80GB-SXM RoCE"):
        assert device_of(word) == "A100-SXM-80GB"
    for word in ("H100-80GB-SXM", "H100-80GB", "h100"):
        assert device_of(word) == "H100-SXM-80GB"
    assert device_of("H100-96GB-HBM2e-500W") == "H100-SXM-96GB-500W"
    assert device_of("H200") == "H200-SXM-141GB"
    for word in ("B200", "GB200", "A1000", "H100-PCIe", "A100-40GB", ""):
        assert device_of(word) is None


def test_the_command_prints_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "runs.csv", {}, {}, {"step_time_s": "9"}, {"model": "Mixtral-8x7B"})
    main([str(path)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3].startswith("beyond 12 %: line 2 Llama-3.1-8B (NeMo)") and "other software" not in printed[-3]
    assert printed[-2].startswith("interval: 95 % of ") and printed[-2].endswith("it holds for 0 of 3 rows, 0.0 %")
    assert printed[-1].endswith("rows 3 of 4") and printed[-1].startswith("mean ")


SMALL = {
    "layers": "2",
    "hidden": "1024",
    "heads": "8",
    "kv_heads": "8",
    "ffn": "4096",
    "seq": "1024",
    "vocab": "32000",
    "model": "GPT",
    "gpus": "4",
    "cp": "1",
    "global_batch": "8",
}


def test_the_planner_finds_published_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data parallelism is the best of a small model, tensor parallelism the worst; a cluster that is too large is left out."""
    rows = [{**SMALL, "dp": "4"}, {**SMALL, "tp": "4", "dp": "1"}, {"gpus": "64", "dp": "32"}]
    path = table(tmp_path / "runs.csv", *rows)
    best, worst = standings(compare(path).rows, 4)
    assert best.place == 1 and best.slower == 0 and best.is_found
    assert worst.slower is not None and worst.slower > CLOSE and worst.place is not None and worst.place > 1
    assert replace(worst, place=6).is_found is False and replace(worst, place=6, slower=0.02).is_found
    assert replace(worst, place=None, slower=None).is_found is False
    main([str(path), "--standing", "4"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("published layouts among the first 5 or within 3 %: ") and printed[-1].endswith(
        " of 2"
    )


def test_the_losses_of_a_layout_add_up_to_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The host is late where a model is small, and more so where tp cuts it; tp's collectives are exposed."""
    wide = {"hidden": "8192", "heads": "64", "kv_heads": "64", "ffn": "32768"}
    rows = [{**SMALL, "dp": "4"}, {**SMALL, "tp": "4", "dp": "1"}, {**SMALL, **wide, "dp": "4"}]
    path = table(tmp_path / "runs.csv", *rows, {**SMALL, "dp": "4", "layers": "9000"})
    small, cut, large, too_large = losses(compare(path).rows)
    for one in (small, cut, large):
        assert sum(one.shares.values()) == pytest.approx(1) and min(one.shares.values()) > -1e-9
    assert cut.shares["host"] > small.shares["host"] > large.shares["host"] == 0
    assert cut.shares["tp"] > 0.02 and small.shares["tp"] == large.shares["tp"] == 0
    assert large.shares["peak"] > small.shares["peak"] > cut.shares["peak"]
    main([str(path), "--losses"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"  line {too_large.row.run.line} GPT: {too_large.lacks}"
    assert printed[-5].split()[-5:] == ["host", "bubble", "transfers", "dp", "optimizer"]
