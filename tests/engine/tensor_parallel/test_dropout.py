"""Dropout masks are a function of element and sample: unbiased, distinct, and sliced, not redrawn."""

from collections.abc import Sequence

import pytest
import torch

from triaxis.engine.tensor_parallel.dropout import DropoutKeys, DropoutSites, dropout


def keys_of(seed: int, samples: Sequence[int]) -> DropoutKeys:
    return DropoutKeys(DropoutSites(seed), samples, torch.tensor(samples))


def mask(p: float, keys: DropoutKeys, site: str = "a", s: int = 64, h: int = 96) -> torch.Tensor:
    """[s, b, h] of 0 and 1 / (1 - p)."""
    positions = torch.arange(s).view(s, 1, 1) * h + torch.arange(h)
    return dropout(torch.ones(s, len(keys.sample_ids), h, dtype=torch.float64), p, keys, site, positions, batch_dim=1)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_kept_fraction_and_the_scale(p: float) -> None:
    kept = mask(p, keys_of(0, range(16))) > 0
    # Standard deviation of the mean of 98,304 Bernoulli draws is below 0.0016.
    assert abs(float(kept.double().mean()) - (1 - p)) < 0.008
    values = mask(p, keys_of(0, [0])).unique()
    assert torch.allclose(values, torch.tensor([0.0, 1 / (1 - p)], dtype=torch.float64))


def test_masks_of_other_samples_sites_and_seeds_are_independent() -> None:
    base = mask(0.5, keys_of(0, [5])) > 0
    for other in (
        mask(0.5, keys_of(0, [6])),
        mask(0.5, keys_of(1, [5])),
        mask(0.5, keys_of(0, [5]), "b"),
        mask(0.5, keys_of(0, [5])).roll(1, dims=2),
        mask(0.5, keys_of(0, [5])).roll(1, dims=0),
    ):
        agreement = float((base == (other > 0)).double().mean())
        assert abs(agreement - 0.5) < 0.03


def test_a_slice_draws_its_slice_and_a_sample_keeps_its_mask_in_any_batch() -> None:
    keys = keys_of(0, [3, 9])
    whole = mask(0.3, keys)
    positions = torch.arange(16, 32).view(-1, 1, 1) * 96 + torch.arange(96)
    part = dropout(torch.ones(16, 2, 96, dtype=torch.float64), 0.3, keys, "a", positions, batch_dim=1)
    assert torch.equal(part, whole[16:32])
    assert torch.equal(mask(0.3, keys_of(0, [9]))[:, 0], whole[:, 1])


def test_zero_probability_is_the_identity() -> None:
    x = torch.randn(3, 1, 2)
    assert dropout(x, 0.0, keys_of(0, [0]), "a", torch.zeros(1, dtype=torch.int64), batch_dim=1) is x
