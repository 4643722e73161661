"""Ranks that differ in configuration, code or data end before the first step, with the difference and both nodes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import run_ranks
from tests.parity.cases import Case
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.config.schema.dotted import with_fields
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.indexed import IndexedWriter
from triaxis.engine.errors import TopologyError
from triaxis.launch.rank import agreement
from triaxis.launch.rank.agreement import agree

pytestmark = pytest.mark.distributed

BASE: dict[str, Any] = {"data.synthetic": False, "data.train": ["web"], "data.tokenizer": "bytes"}


def config(**fields: Any) -> Config:
    return with_fields(Case("llama", num_layers=2).config(), {**BASE, **fields})


def joined(rank: int, configs: list[Config], versions: list[str]) -> str:
    """Each rank is a node of its own: what it says, or "" where all agree."""
    environment = RankEnvironment(rank=rank, world_size=len(configs), local_rank=0, local_world_size=1)
    agreement.metadata.version = lambda name: versions[rank]  # type: ignore[assignment]
    try:
        agree(configs[rank], environment, trains=True)
    except TopologyError as error:
        return str(error)
    return ""


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, str]:
    """Two corpora of one size that differ in a token, and a copy of the first."""
    documents = {"web": [1, 2, 3, 4], "copy": [1, 2, 3, 4], "other": [1, 2, 3, 5]}
    for name, tokens in documents.items():
        with IndexedWriter(str(tmp_path / name), "uint16") as writer:
            writer.add_document(np.array(tokens))
    return {name: str(tmp_path / name) for name in documents}


@pytest.mark.parametrize(
    ("fields", "version", "words"),
    [
        ({}, "2.13", ["the version of torch", "2.12", "2.13"]),
        ({"optimizer.lr": 1e-4}, "2.12", ["optimizer.lr:", "rank 1", "0.0001"]),
        ({"train.seed": 99, "optimizer.lr": 1e-4}, "2.12", ["differ in train.seed; and 1 more differ", "99"]),
        ({"data.train": [{"path": "other"}]}, "2.12", ["differ in corpus 1:", "4 tokens"]),
        ({"data.train": [{"path": "copy", "weight": 2.0}]}, "2.12", ["differ in data.train:", "[1.0]", "[2.0]"]),
        ({"data.train": [{"path": "gone"}]}, "2.12", ["differ in corpus 1:", "cannot be read: "]),
        # Places of a node, and another path to the same tokens.
        ({"data.train": [{"path": "copy"}], "data.cache_dir": "/scratch", "runtime.runs_dir": "here"}, "2.12", []),
    ],
)
def test_the_first_difference_is_named_with_both_nodes(
    fields: dict[str, Any], version: str, words: list[str], corpora: dict[str, str]
) -> None:
    here = config(**{"data.train": [corpora["web"]]})
    if "data.train" in fields:
        named = [{**each, "path": corpora.get(each["path"], each["path"])} for each in fields["data.train"]]
        fields = {**fields, "data.train": named}
    there = config(**{"data.train": [corpora["web"]], **fields})
    said = run_ranks(joined, 3, [here, there, here], ["2.12", version, "2.12"])
    assert len(set(said)) == 1, "every rank says the same"
    assert bool(said[0]) == bool(words) and all(word in said[0] for word in words), said[0]


def test_the_sources_of_a_node_are_a_fact() -> None:
    facts = agreement._node_facts(config(), trains=False)
    assert "the source engine/train.py" in facts and len(facts) > 500
    ours, theirs = ({"host": host, "facts": {**facts}} for host in ("a", "b"))
    theirs["facts"]["the source models/gpt/block.py"] = "0" * 64
    text = agreement.first_difference(ours, theirs, 8)
    assert "differ in the source models/gpt/block.py:\n  rank 0 (a): " in text and f"  rank 8 (b): {'0' * 64}" in text


def test_files_that_change_meanwhile_are_said() -> None:
    facts = {"host": "a", "facts": {"optimizer.lr": 1}}
    assert "files changed during the comparison" in agreement.first_difference(facts, facts, 3)
