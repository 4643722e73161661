"""The banner and the summary: what they say, and that a wrong model is not hidden."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from triaxis.engine.config.quantities.plan import batch_plan
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.deal import windows_of
from triaxis.engine.context_parallel.imbalance import work_of_ranks
from triaxis.engine.data.document_statistics import DocumentStatistics
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.telemetry.outlets.banner import End, Start, show_end, show_start
from triaxis.engine.telemetry.outlets.console import Report
from triaxis.engine.telemetry.record.flops import cost_of_cp_imbalance
from triaxis.engine.telemetry.record.metrics import Meter
from triaxis.engine.telemetry.record.parameters import parameters_by_module
from triaxis.models.specs import model_specs


def rows(screen: io.StringIO) -> dict[str, str]:
    """Text by label, wrapped lines joined."""
    found: dict[str, str] = {}
    label = ""
    for line in screen.getvalue().splitlines()[1:]:
        head = line[2:14].strip()
        label = head or label
        found[label] = f"{found.get(label, '')} {line[14:].strip()}".strip()
    return found


def listed(config: Config) -> dict[str, int]:
    return {spec.name: spec.numel for spec in model_specs(config.model)}


def start_rows(
    config: Config, run: RunDirectory, start: Start | None = None, device_name: str = "cpu"
) -> dict[str, str]:
    return rows(show(config, run, start, device_name))


def show(config: Config, run: RunDirectory, start: Start | None = None, device_name: str = "cpu") -> io.StringIO:
    screen = io.StringIO()
    plan = batch_plan(config, 2)
    meter = Meter(config, plan, layers_per_chunk=[2], world_size=4, device_name=device_name, attempt=0)
    start = start or Start(
        config,
        plan,
        "tp=2 dp=2: 4 ranks",
        "cpu, gloo",
        "attention: flash",
        "0.0164 GB predicted",
        parameters_by_module(config.model),
        listed(config),
        recompute=config.recompute,
    )
    show_start(Report(30, 10, terminal=screen, log=None, show_mfu=False), run, meter, start)
    return screen


def test_the_banner_says_what_runs_and_where_it_is_written(
    make_config: Callable[..., Config], run: RunDirectory
) -> None:
    config = make_config(recompute={"granularity": "selective"})
    said = start_rows(config, run)
    assert said["layout"] == "tp=2 dp=2: 4 ranks"
    assert said["device"] == "cpu, gloo, bf16"
    assert said["batch"] == str(batch_plan(config, 2))
    assert said["memory"] == "0.0164 GB predicted"
    total = f"{sum(parameters_by_module(config.model).values()):,}"
    assert said["parameters"].startswith(f"{total} counted = {total} by the formula: ")
    assert "causal" in said["FLOPs"] and "recompute: selective" in said["FLOPs"]
    assert "peak" not in said["FLOPs"], "a CPU has none"
    assert str(run.path) in said["results"]


def test_the_banner_of_a_later_attempt_says_what_has_changed(
    make_config: Callable[..., Config], run: RunDirectory
) -> None:
    config = make_config(recompute={"granularity": "selective"})
    start_rows(config, run)
    later = [RunDirectory.join(run.path.parent, run.path.name, attempt) for attempt in (1, 2, 3)]
    for each in later:
        each.rank_log(0).parent.mkdir(parents=True)
    title, *said = show(config, later[0]).getvalue().strip().splitlines()
    assert title.endswith(", attempt 2, as before except for")
    assert all("attempt_01" in line or "results" in line for line in said), "its logs are in another folder"
    parameters = parameters_by_module(config.model)
    other = Start(
        config,
        batch_plan(config, 2),
        "tp=1 dp=4: 4 ranks",
        "cpu, gloo",
        "attention: flash",
        "0.0164 GB predicted",
        parameters,
        listed(config),
        config.recompute,
    )
    text = show(config, later[1], other).getvalue()
    assert "layout   tp=1 dp=4: 4 ranks" in text and not {"batch ", "parameters", "kernels"} & set(text.split())
    (later[1].rank_log(0).parent / "banner.json").write_text("{")
    assert "layout" not in show(config, later[2]).getvalue(), "compared with the last that can be read"


def test_the_banner_names_a_head_in_pieces(make_config: Callable[..., Config], run: RunDirectory) -> None:
    said = start_rows(make_config(recompute={"granularity": "selective", "head_tokens": 8}), run)
    assert said["head"] == "logits of 8 tokens at a time"
    assert said["recompute"] == "selective modules=[attention]" and said["FLOPs"].endswith("[attention]")
    assert "head" not in start_rows(make_config(recompute={"head_tokens": None}), run)


def test_the_banner_describes_documents(make_config: Callable[..., Config], run: RunDirectory) -> None:
    config = with_value(make_config(data={"synthetic": True, "attention": "within"}), "model.seq_length", 4096)
    s = config.model.seq_length
    unequal = DocumentStatistics(s, (((s,), (s // 2, s // 2)),))
    plain = Start(
        config,
        batch_plan(config, 2),
        "",
        "cpu",
        "",
        "",
        parameters_by_module(config.model),
        listed(config),
        config.recompute,
    )
    said = start_rows(config, run, replace(plain, documents=unequal))
    assert (
        said["documents"] == "attention within, 1.5 per sample: 75% of the attention FLOPs across (the first 2 samples)"
    )
    assert "computes" in said["imbalance"] and "more than the mean" in said["imbalance"]
    said = start_rows(config, run, replace(plain, doubts=[("validation", "reads its samples twice")]))
    assert said["validation"] == "reads its samples twice"
    assert "imbalance" not in said and "documents" not in said


def test_the_banner_describes_imbalance_over_cp(make_config: Callable[..., Config], run: RunDirectory) -> None:
    data = {"synthetic": True, "attention": "within"}
    config = make_config(data=data, parallel={"cp": 2})
    s = config.model.seq_length
    start = Start(
        config,
        batch_plan(config, 2),
        "",
        "cpu",
        "",
        "",
        parameters_by_module(config.model),
        listed(config),
        config.recompute,
    )
    documents = DocumentStatistics(s, (((s - 4, 4), (s,)),))
    work = [work_of_ranks([row], 2, windows_of(config.model)) for row in ((s - 4, 4), (s,))]
    most = sum(map(max, work)) / (sum(map(sum, work)) / 2)
    said = start_rows(config, run, replace(start, documents=documents))["imbalance"]
    cost = cost_of_cp_imbalance(config.model, documents, most)
    assert (
        f"the most attention work in a microbatch has {most - 1:.1%} more than the mean; the others wait for {cost:.2%} of"
        in said
    )
    whole = with_value(config, "parallel.cp", 1)
    assert "over cp" not in start_rows(whole, run, replace(start, config=whole, documents=documents)).get(
        "imbalance", ""
    )


def test_the_banner_says_that_gathered_inputs_are_kept(make_config: Callable[..., Config], run: RunDirectory) -> None:
    cut = {"parallel": {"tp": 2, "sequence_parallel": True}}
    kept = RecomputeConfig(gathered_inputs="keep")
    asked = make_config(**cut, recompute={"memory_gb": 70})
    start = Start(
        asked, batch_plan(asked, 2), "", "cpu", "", "", parameters_by_module(asked.model), listed(asked), kept
    )
    assert start_rows(asked, run, start)["gathered"].endswith("kept for the backward (they fit 70 GB)")
    named = make_config(**cut, recompute={"gathered_inputs": "keep"})
    assert start_rows(named, run)["gathered"].endswith("kept for the backward")
    assert "gathered" not in start_rows(make_config(recompute={"gathered_inputs": "keep"}), run)


def test_a_known_peak_comes_with_its_source_and_the_convention(
    make_config: Callable[..., Config], run: RunDirectory
) -> None:
    config = make_config()
    counted, listed_here = parameters_by_module(config.model), listed(config)
    start = Start(config, batch_plan(config, 2), "", "", "", "", counted, listed_here, config.recompute, "cuda")
    said = start_rows(config, run, replace(start, memory="47.1 GB"), device_name="NVIDIA H200")
    assert "989.4 TFLOP/s per device" in said["FLOPs"] and "data sheet" in said["FLOPs"]
    assert "6 x GEMM weights" in said["FLOPs"] and "MFU = model / peak" in said["FLOPs"]
    assert said["GPU memory"] == "47.1 GB"
    assert "telemetry.peak_tflops=..." in start_rows(config, run, start, device_name="a new card")["FLOPs"]


def test_a_model_that_lost_a_layer_is_not_hidden(make_config: Callable[..., Config], run: RunDirectory) -> None:
    config = make_config()
    start = Start(
        config,
        batch_plan(config, 2),
        "",
        "cpu",
        "",
        "",
        parameters_by_module(config.model),
        listed(config),
        config.recompute,
    )
    lost = replace(start, counted={**start.counted, "mlp": start.counted["mlp"] // 2})
    said = start_rows(config, run, lost)["parameters"]
    assert "not the configured one" in said and f"mlp: {lost.counted['mlp']:,} counted" in said


def test_the_summary_has_the_losses_the_text_and_the_place(run: RunDirectory) -> None:
    screen = io.StringIO()
    report = Report(30, 10, terminal=screen, log=None, show_mfu=False)
    saved = run.path / "checkpoints" / "step_00000300"
    show_end(report, run, End(300, 75.0, 1.9, 2.1, {"uniform": 5.5}, saved, "def ", "f(x):\n\treturn x\n\n"))
    text = screen.getvalue()
    assert "Finished: 300 steps, 1:15 of training" in text
    assert text.index("uniform") < text.index("validation loss") < text.index("training loss")
    assert "f(x):\n" in text and "    return x\n" in text and str(run.path) in text
    assert rows(screen)["saved"] == f"in {saved}"
    assert f"evaluate {run.path} --text FILE" in rows(screen)["next"]
    without = _end_without_text_and_checkpoint(run)
    assert "prompt" not in without and without["saved"].startswith("nothing (checkpoint.interval=never)")
    assert "next" not in without


def _end_without_text_and_checkpoint(run: RunDirectory) -> dict[str, str]:
    screen = io.StringIO()
    show_end(Report(30, 10, terminal=screen, log=None, show_mfu=False), run, End(1, 1.0, None, None, {}, None))
    return rows(screen)


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        ({}, "the last step and a stop, in {run}/checkpoints/"),
        ({"interval": 1000, "dir": "/disk/demo"}, "every 1,000 steps, the last step and a stop, in /disk/demo/"),
        ({"interval": "never"}, "nothing (checkpoint.interval=never): the weights are lost when the run ends"),
    ],
)
def test_the_banner_says_what_is_saved_and_where(
    make_config: Callable[..., Config], run: RunDirectory, checkpoint: dict[str, Any], said: str
) -> None:
    assert start_rows(make_config(checkpoint=checkpoint), run)["saves"] == said.format(run=run.path)
