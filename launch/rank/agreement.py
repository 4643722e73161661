"""Compare, before the first step, facts that all ranks must share.

Ranks that differ could silently train different models. Facts come from these ranks:

every rank             the configuration, except paths on its node
first rank of a node   package sources, versions of torch and kernel packages; when training also corpora and tokenizer
"""

import hashlib
import json
import socket
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

from triaxis.engine.checkpoint.resume_rules import flat
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.comm.store_agreement import Facts, compare_details, is_alone, naming_the_silent, run_store
from triaxis.engine.config.schema.extension_parts import Extension
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.sources import Source
from triaxis.engine.data.corpus.own import open_corpus
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.data.run_tokenizer import corpora_of
from triaxis.engine.errors import DataError, brief
from triaxis.engine.program import ROOT
from triaxis.engine.storage.redaction import tree_without_secrets

PACKAGES = ("torch", "triton", "transformer-engine", "apex")
"""Packages whose versions affect what a step computes."""

PRODUCT = ("engine", "models", "launch")
NODE_FIELDS = ("data.cache_dir", "data.tokenizer", "model.extension.source", "runtime.runs_dir")
"""Paths that may differ between nodes; the tokenizer, the corpora and an extension are compared by content."""


def agree(config: Config, environment: RankEnvironment, *, trains: bool) -> None:
    """Compare all ranks' configuration, code and data. Every rank calls it after `start`.

    Args:
        config: configuration as read, with all its phases.
        trains: whether the ranks read corpora.

    Raises:
        TopologyError: ranks differ; raised on every rank, with the first difference, the values and the nodes.
        PeerLostError: a rank does not answer within `runtime.timeout_seconds`.
    """
    if is_alone():
        return
    store = run_store("agreement")
    own = _config_facts(config)
    # Two launchers on one host may each have a checkout, so a node is named by its first rank.
    first = environment.rank - environment.local_rank
    node = f"node/{first}"
    if environment.local_rank == 0:
        store.set(node, _digest(_node_facts(config, trains=trains)))
    with naming_the_silent(store, environment.rank, {first: node}, environment.local_world_size):
        digest = _digest({"config": own, "node": store.get(node).decode()})

    def details() -> Facts:
        return {"host": socket.gethostname(), "facts": {**own, **_node_facts(config, trains=trains)}}

    per_node = environment.local_world_size
    compare_details(store, environment.rank, environment.world_size, digest, details, first_difference, per_node)


def first_difference(ours: Facts, theirs: Facts, rank: int) -> str:
    """Format the error message about the first fact that differs between ranks 0 and `rank`.

    Facts are settings, code, package versions and corpora.
    """
    here, there = dict(_facts(ours)), dict(_facts(theirs))
    different = [key for key in {**here, **there} if here.get(key) != there.get(key)]
    if not different:
        hosts = f"{ours['host']} and {theirs['host']}"
        return f"ranks 0 and {rank} ({hosts}) differed, but files changed during the comparison. Start again."
    more = f"; and {len(different) - 1:,} more differ" if len(different) > 1 else ""
    first = different[0]
    values = [brief(str(facts.get(first, "absent"))) for facts in (here, there)]
    return (
        f"ranks of one run differ in {first}{more}:\n"
        f"  rank 0 ({ours['host']}): {values[0]}\n"
        f"  rank {rank} ({theirs['host']}): {values[1]}\n"
        "They would silently train different models. Start all nodes with the same command, configuration, "
        "environment and checkout."
    )


def _facts(details: Facts) -> dict[str, Any]:
    facts = details["facts"]
    assert isinstance(facts, dict)
    return facts


def _config_facts(config: Config) -> dict[str, Any]:
    """Return the configuration's fields by dotted name. A corpus is represented by its weight, without its path."""
    tree = tree_without_secrets(config.model_dump(mode="json"))
    for place in (tree["data"], *tree["phases"]):
        for key in ("train", "valid", "data.train"):
            if place.get(key) is not None:
                place[key] = [Source.model_validate(source).weight for source in place[key]]
    return {key: value for key, value in flat(tree) if key not in NODE_FIELDS}


def _node_facts(config: Config, *, trains: bool) -> dict[str, Any]:
    """Return digests of source files, package versions, and identities of the data that the run reads."""
    files = sorted(path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))
    facts = {f"the source {path.relative_to(ROOT)}": hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    for name in PACKAGES:
        try:
            facts[f"the version of {name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[f"the version of {name}"] = "not installed"
    if trains:
        for number, prefix in enumerate(corpora_of(config), start=1):
            facts[f"corpus {number}"] = _read(partial(_corpus, config.model.own), prefix)
        if config.data.tokenizer is not None:
            facts["the tokenizer"] = _read(_tokenizer, config.data.tokenizer)
    return facts


def _read(identity: Callable[[str], str], name: str) -> str:
    """Return `identity(name)`, or the error as text, so that a node without the data differs from the others."""
    try:
        return identity(name)
    except DataError as error:
        return f"cannot be read: {error}"


def _corpus(own: Extension, prefix: str) -> str:
    corpus = open_corpus(prefix, own)
    return f"{corpus.num_tokens:,} tokens, {corpus.fingerprint}"


def _tokenizer(name: str) -> str:
    return load_tokenizer(name).identity


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
