"""Record the reference's expert choices, and count the choices that differ in a layout.

    reference.routing.safetensors
        0|3|17              step 0, layer 3, sample 17: sorted experts chosen by each token, int32 [s, k]
        0|counted 3|17      each token's k experts with the highest scores, if the sequence-level balance loss counts these
    digest of a layer       sum over tokens of hash(sample, position, layer, experts), modulo 2^64

Each token is routed on one rank. So the ranks' digests add up to the reference's digest.

In float64 every choice must equal the reference's. In a narrower dtype, rounding may swap two nearly equal scores, after which all
later layers differ. So each rank counts its differing choices, and continues with the reference's.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from triaxis.engine.numerics.hashing import GOLDEN, key64, mix_words_
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.launch.verify.verdict.records import RoutingReport
from triaxis.models.gpt.chunk import GPTChunk
from triaxis.models.gpt.moe import MoE

REFERENCE_ROUTING = "reference.routing.safetensors"


class Routings:
    """A recorder of the expert choices in this rank's layers, compared with the reference's.

    It counts the choices that the reference did not make for the same token. The caller sets `step`, from 0, before each step.

    Args:
        chunks: the rank's model chunks; their expert layers are recorded in training from now on.
        folder: folder with the reference's choices; None: this is the reference. If its file is missing, no choice
            counts as different.
        imposed: whether each choice is replaced by the reference's, after it is counted.
    """

    def __init__(self, chunks: Sequence[Any], folder: Path | None, *, imposed: bool) -> None:
        self.step = 0
        self._known = None
        if folder is not None and (folder / REFERENCE_ROUTING).exists():
            self._known = safe_open(folder / REFERENCE_ROUTING, framework="pt")
            self._names = set(self._known.keys())
        self._imposed = imposed
        self._written: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._reports: dict[tuple[int, int], RoutingReport] = {}
        for chunk in chunks:
            # Layers for multi-token prediction choose experts like the others.
            for module in cast(GPTChunk, chunk).modules():
                if isinstance(module, MoE):
                    self._follow(module, is_reference=folder is None)

    def reports(self) -> tuple[RoutingReport, ...]:
        """Comparisons so far, one per step and layer."""
        return tuple(self._reports.values())

    def write(self, folder: Path) -> None:
        """Write the reference's choices to `folder`."""
        whole = {}
        for name, parts in self._written.items():
            positions, experts = (torch.cat(each) for each in zip(*parts, strict=True))
            whole[name] = experts[positions.argsort()].to(torch.int32)
        save_file(whole, folder / REFERENCE_ROUTING)

    def _follow(self, moe: MoE, *, is_reference: bool) -> None:
        choose, count = moe.chosen, moe.counted

        def known(
            keys: DropoutKeys, shape: torch.Size, scores: torch.Tensor, experts: torch.Tensor, *, of: str
        ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
            """Yield (sample, positions, experts, the reference's experts) per sample.

            The reference's run also keeps `experts` for `write`, under the name `step|<of><layer>|sample`.
            """
            num_samples = shape[1]
            positions = moe.positions(keys, shape, scores).view(-1, num_samples).cpu()
            by_sample = experts.cpu().view(len(positions), num_samples, -1)
            for column, sample in enumerate(keys.sample_ids):
                places, own = positions[:, column], by_sample[:, column]
                name = f"{self.step}|{of}{moe.layer}|{sample}"
                if is_reference:
                    self._written.setdefault(name, []).append((places, own.sort().values))
                yield sample, places, own, self._wanted(name, places, own)

        def imposed(wanted: Sequence[torch.Tensor], experts: torch.Tensor) -> torch.Tensor:
            return torch.stack(tuple(wanted), dim=1).flatten(0, 1).to(experts.device) if self._imposed else experts

        def chosen(keys: DropoutKeys, shape: torch.Size, scores: torch.Tensor) -> torch.Tensor:
            experts = choose(keys, shape, scores)
            if not moe.training:
                return experts
            columns = list(known(keys, shape, scores, experts, of=""))
            for column in columns:
                self._add(moe.layer, *column)
            return imposed([wanted for *_, wanted in columns], experts)

        def counted(keys: DropoutKeys, shape: torch.Size, scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
            found = count(keys, shape, scores, experts)
            if not (moe.training and moe.experts.router.moe.counts_scores):
                return found
            return imposed([wanted for *_, wanted in known(keys, shape, scores, found, of="counted ")], found)

        moe.chosen = chosen  # type: ignore[method-assign]
        moe.counted = counted  # type: ignore[method-assign]

    def _wanted(self, name: str, positions: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Look up the reference's experts for a sample's tokens, int64 [n, k].

        Return `experts` itself if nothing is recorded.
        """
        if self._known is None or name not in self._names:
            return experts
        return self._known.get_tensor(name)[positions].long()

    def _add(
        self, layer: int, sample: int, positions: torch.Tensor, experts: torch.Tensor, wanted: torch.Tensor
    ) -> None:
        is_known = (experts.unsqueeze(-1) == wanted.unsqueeze(-2)).any(-1)
        used = wanted if self._imposed else experts
        report = RoutingReport(
            self.step, layer, experts.numel(), int((~is_known).sum()), routing_digest(layer, sample, positions, used)
        )
        before = self._reports.get((self.step, layer))
        self._reports[self.step, layer] = report if before is None else before + report


def routing_digest(layer: int, sample: int, positions: torch.Tensor, experts: torch.Tensor) -> int:
    """Sum hash(sample, position, layer, experts) over tokens. `positions` is int64 [n]; `experts`, int64 [n, k]."""
    words = mix_words_(positions * GOLDEN + key64(f"{layer}/{sample}"))
    for chosen in experts.sort().values.unbind(1):
        words = mix_words_((words ^ (chosen + 1)) * GOLDEN)
    return int(words.sum())
