"""The committed numbers: GPU code of each function, and the work of a step of each model (no triton here).

`python -m benchmarks.gpu_code --write` wrote `golden.json`, with the versions of torch and triton that it had. Other versions write
other code.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("golden.json")


@dataclass(frozen=True, slots=True)
class GpuCode:
    """The code of one function for one GPU.

    Attributes:
        launches: kernels that a call launches, `operators` included.
        num_bytes: read and written by them: each tensor that a kernel is given, whole, once; a tensor that it changes, twice.
        operators: torch's own, called between the kernels.
        kernels: Triton kernels.
        configurations: block sizes and warps of all kernels; inductor would measure those of a kernel and take the fastest.
        spilling: number of configurations that store registers in memory; of those inductor refuses the worse ones.
        registers: of a thread, the most of any configuration.
        spills: bytes that each kernel's best configuration stores and loads, of all kernels together.
    """

    launches: int
    num_bytes: int
    operators: tuple[str, ...]
    kernels: int
    configurations: int
    spilling: int
    registers: int
    spills: int


@dataclass(frozen=True, slots=True)
class Function:
    """A compiled function at one set of shapes.

    Attributes:
        key: as of `FusedCall.key`.
        part: of a step.
        elements: of its largest argument; of any length, of the example that was compiled.
        code: by card.
    """

    key: str
    part: str
    elements: int
    code: Mapping[str, GpuCode]

    def bytes_per_element(self, card: str) -> float:
        return self.code[card].num_bytes / self.elements


@dataclass(frozen=True, slots=True)
class Work:
    """Calls and operators of a step.

    Attributes:
        calls: number of calls by key.
        elements: elements that these calls work on, by key.
        eager: (bytes, launches) of operators that run by themselves, by part.
        products: launches of GEMMs.
        attentions: launches of fused attention.
    """

    calls: Mapping[str, int]
    elements: Mapping[str, int]
    eager: Mapping[str, tuple[int, int]]
    products: int
    attentions: int


@dataclass(frozen=True, slots=True)
class Golden:
    """The whole file.

    Attributes:
        torch, triton: versions.
        functions: by key.
        steps: work of a step of the full model, by `shape, micro batch size`.
    """

    torch: str
    triton: str
    functions: Mapping[str, Function]
    steps: Mapping[str, Work]

    def text(self) -> str:
        """Return the file: a line for each function and card, so that a change shows in few lines."""
        functions = [
            {
                "key": one.key,
                "part": one.part,
                "elements": one.elements,
                "code": {card: asdict(code) for card, code in one.code.items()},
            }
            for one in self.functions.values()
        ]
        rows = ",\n".join(_function_text(one) for one in functions)
        steps = ",\n".join(f"    {json.dumps(name)}: {_work_text(work)}" for name, work in self.steps.items())
        return (
            f'{{\n  "torch": {json.dumps(self.torch)},\n  "triton": {json.dumps(self.triton)},\n'
            f'  "functions": [\n{rows}\n  ],\n  "steps": {{\n{steps}\n  }}\n}}\n'
        )


def _function_text(one: Mapping[str, Any]) -> str:
    head = ", ".join(f"{json.dumps(name)}: {json.dumps(one[name])}" for name in ("key", "part", "elements"))
    code = ",\n".join(f"      {json.dumps(card)}: {json.dumps(values)}" for card, values in one["code"].items())
    return f'    {{{head}, "code": {{\n{code}}}}}'


def _work_text(work: Work) -> str:
    parts = [f"      {json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in asdict(work).items()]
    return "{\n" + ",\n".join(parts) + "\n    }"


def parse(text: str) -> Golden:
    """Read the text of such a file."""
    tree = json.loads(text)
    functions = {
        one["key"]: Function(
            one["key"],
            one["part"],
            one["elements"],
            {card: GpuCode(**code | {"operators": tuple(code["operators"])}) for card, code in one["code"].items()},
        )
        for one in tree["functions"]
    }
    steps = {
        name: Work(**work | {"eager": {part: tuple(pair) for part, pair in work["eager"].items()}})
        for name, work in tree["steps"].items()
    }
    return Golden(tree["torch"], tree["triton"], functions, steps)


def step_key(name: str, micro_batch_size: int, *, in_fp8: bool) -> str:
    """Return the name of a step in the committed file."""
    return f"{name}, micro batch {micro_batch_size}" + (", fp8" if in_fp8 else "")


def committed() -> Golden:
    """Read the committed file."""
    return parse(PATH.read_text())


def differences(found: Golden, wanted: Golden) -> list[str]:
    """List what differs between two files, a line each: found, then wanted."""
    lines = [
        f"{name} {getattr(found, name)}, committed {getattr(wanted, name)}"
        for name in ("torch", "triton")
        if getattr(found, name) != getattr(wanted, name)
    ]
    for kind, ours, theirs in (("", found.functions, wanted.functions), ("step of ", found.steps, wanted.steps)):
        lines += [f"{kind}{key}: not in the committed file" for key in ours if key not in theirs]
        lines += [f"{kind}{key}: in the committed file only" for key in theirs if key not in ours]
        lines += [
            f"{kind}{key}: {ours[key]}, committed {theirs[key]}"
            for key in ours
            if key in theirs and ours[key] != theirs[key]
        ]
    return lines
