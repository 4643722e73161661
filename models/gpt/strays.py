"""Refuse strays, which are a chunk's state that `models/specs.py` does not list.

Checkpoints omit a stray, and ranks do not add up its gradients. Each rank would train its own model unnoticed. A chunk is checked
twice:

    when it is built                   parameters and persistent buffers of its modules, also of modules in lists, tuples and dicts
    in its first forward and backward  leaves of the autograd graph, which closures and other objects may hold

A recomputed function records no graph in the forward, so its first replay is checked.

The checks miss tensors without a gradient that no module holds as a buffer. They also miss a closure's tensors in layers that no
gradient reaches.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from triaxis.engine.activations.recompute import watch_replay
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import ModelError
from triaxis.engine.storage.user_module import PRIVATE
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def refuse_strays(chunk: nn.Module, model: ModelConfig, layers: range, held: Mapping[str, ShardedParameter]) -> None:
    """Refuse strays: tensors that a chunk holds or trains, but `models/specs.py` does not list.

    Args:
        chunk: module called with a tensor or None, and a microbatch.
        model, layers: the chunk's model and layers, for messages.
        held: this rank's parameters by name. Later chunks may add their parameters until the first forward.

    Raises:
        ModelError: there is a stray. This call raises it, or the chunk's first forward or first backward does.
    """
    sizes = {model.ffn_size: "model.ffn_size", model.hidden_size: "model.hidden_size"}
    listed, strays = _identities(held), {}
    for place, state in _state(chunk, _Place(type(chunk)), set()):
        if id(state) not in listed:
            # Layers are alike, so one entry stands for all.
            strays[place.name] = _entry(
                sizes,
                f"{place.path or 'chunk'}, {place.owner.__name__}.{place.attribute}",
                state,
                place.name,
                _file_of(place.owner),
                place.attribute,
            )
    _refuse(list(strays.values()))

    def look(module: nn.Module, inputs: Sequence[object], output: torch.Tensor) -> None:
        if output.grad_fn is not None:
            hook.remove()
            describe = partial(_entry_of_leaf, sizes, f"the chunk that begins with layer {layers.start}")
            _look_at_graph(inputs, output, listed=_identities(held), describe=describe)

    hook = chunk.register_forward_hook(look)


def _identities(held: Mapping[str, ShardedParameter]) -> frozenset[int]:
    return frozenset(id(parameter.value) for parameter in held.values())


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor or module in a chunk, for messages.

    Attributes:
        owner: class of the innermost enclosing module that `triaxis.models` or an extension defines.
        path: path from the chunk to the owner, with a star instead of the layer number.
        attribute: path from the owner to the place.
    """

    owner: type
    path: str = ""
    attribute: str = ""

    @property
    def name(self) -> str:
        whole = ".".join(filter(None, (self.path, self.attribute)))
        return re.sub(r"^(blocks|ahead\.layers)\.\d+(\.block)?", "layers.*", whole)

    def within(self, name: object) -> "_Place":
        return replace(self, attribute=f"{self.attribute}.{name}" if self.attribute else str(name))

    def at(self, module: nn.Module) -> "_Place":
        is_of_models = type(module).__module__.startswith(("triaxis.models.", PRIVATE))
        return _Place(type(module), self.name) if is_of_models else self


def _state(module: nn.Module, place: _Place, seen: set[int]) -> Iterator[tuple[_Place, torch.Tensor]]:
    """Yield a module's parameters, persistent buffers and other tensors that require gradients, with their places."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for name, state in module.state_dict(keep_vars=True).items():
        if "." not in name and isinstance(state, torch.Tensor):
            yield place.within(name), state
    others = {name: each for name, each in vars(module).items() if name not in _OF_EVERY_MODULE}
    for name, each in (*module.named_children(), *others.items()):
        yield from _contents(each, place.within(name), seen)


def _contents(thing: object, place: _Place, seen: set[int]) -> Iterator[tuple[_Place, torch.Tensor]]:
    if isinstance(thing, nn.Module):
        yield from _state(thing, place.at(thing), seen)
    elif isinstance(thing, torch.Tensor) and thing.requires_grad:
        yield place, thing
    elif isinstance(thing, dict | list | tuple):
        for name, each in thing.items() if isinstance(thing, dict) else enumerate(thing):
            yield from _contents(each, place.within(name), seen)


def _look_at_graph(
    inputs: Sequence[object],
    output: torch.Tensor,
    *,
    listed: frozenset[int],
    describe: Callable[[str, torch.Tensor], str],
) -> None:
    """Refuse leaves in the output's graph that are neither inputs nor `listed`.

    Recomputed functions are checked when they replay. `describe(reader, leaf)` writes a stray's entry in the message.
    """
    legal = listed | {id(each) for each in inputs}
    look: Callable[[Sequence[object], torch.Tensor], None] = partial(_look_at_graph, listed=listed, describe=describe)
    strays = []
    for reader, node in _edges(output):
        watch_replay(node, look)
        leaf = _leaf(node)
        # A leaf without elements trains nothing.
        if leaf is not None and id(leaf) not in legal and leaf.numel():
            strays.append(describe(reader, leaf))
    _refuse(strays)


def _edges(output: torch.Tensor) -> Iterator[tuple[str, Node]]:
    """Yield each node in the output's autograd graph, as (name of its reader's type, node).

    The reader is a node that uses this node's result. The name is "" for the output's own node, which has no reader.
    """
    waiting = [] if output.grad_fn is None else [("", output.grad_fn)]
    seen = {node for _, node in waiting}
    while waiting:
        reader, node = waiting.pop()
        yield reader, node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append((type(node).__name__, below))


def _leaf(node: Node) -> torch.Tensor | None:
    """Return the leaf tensor into which this node accumulates a gradient, else None."""
    accumulates: Any = node
    return accumulates.variable if type(node).__name__ == "AccumulateGrad" else None


def _file_of(owner: type) -> str:
    """Path to the file that defines a class, relative to the package. An extension's file has its full path."""
    if owner.__module__.startswith(PRIVATE):
        return str(sys.modules[owner.__module__].__file__)
    return f"{owner.__module__.removeprefix('triaxis.').replace('.', '/')}.py"


def _entry_of_leaf(sizes: Mapping[int, str], where: str, reader: str, leaf: torch.Tensor) -> str:
    what = f"a tensor that no module holds, read by {reader} in {where}"
    return _entry(sizes, what, leaf, "layers.*.NAME", "the module that reads it", "NAME")


def _entry(sizes: Mapping[int, str], what: str, state: torch.Tensor, name: str, file: str, attribute: str) -> str:
    """Describe a stray (a tensor in no parameter list), and the two lines that register it.

    `sizes` maps a dim's size to its config field. The text shows the field's name, since `triaxis verify` shrinks models.
    """
    shape = ", ".join(str(sizes.get(size, size)) for size in state.shape) + ("," if state.ndim == 1 else "")
    if not state.requires_grad:
        fields = 'Init("zeros"), decay=False, is_trained=False'
    else:
        fields = 'Init("normal", model.init_std)' if state.ndim > 1 else 'Init("ones"), decay=False'
    asked = f'f"{name.replace("*", "{layer}")}"' if "*" in name else f'"{name}"'
    taken = f'f"{{name}}.{attribute}"' if "*" in name else asked
    listing = "models/specs.py"
    if file.startswith("/"):  # of an extension, whose parts list names inside them
        listing, asked = f"{file}, in specs", f'"{attribute}"'
    return (
        f"{what}: {str(state.dtype).removeprefix('torch.')} {list(state.shape)}\n"
        f"     {listing}: yield ParamSpec({asked}, ({shape}), {fields})\n"
        f"     {file}: self.{attribute.replace('.', '_')} = context.parameter({taken})"
    )


def _refuse(strays: Sequence[str]) -> None:
    if strays:
        entries = "\n".join(f"  {number}. {entry}" for number, entry in enumerate(strays, start=1))
        raise ModelError(
            f"the model holds state that no list of parameters has:\n{entries}\n"
            "Checkpoints would not have it, and ranks would not add up its gradients: each would train a model of its own.\n"
            "Register each by its two lines, with the start that it needs; the forward reads it by tracked(). A tensor that is\n"
            "cut over ranks, or has a gradient from a part of the tokens, needs one more field: tp_dim, or grad_is_partial."
        )
