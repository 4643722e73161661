"""What becomes of saved tensors: kept, made again, or moved to the host and back, with the same bits and no leak."""

import gc
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.page_locked import is_page_locked
from triaxis.engine.activations.offload import HostMemory
from triaxis.engine.activations.saved_tensors import SavedTensors
from triaxis.engine.activations.saving_hooks import SavingHooks
from triaxis.engine.device.copy_lane import InPlace, Mark
from triaxis.engine.device.pinned_memory import Pageable

CPU = torch.device("cpu")
WIDTH = 64


class Journal(InPlace):
    """Writes down what is copied where and what is waited for; copies are made when they are waited for, as late as can be."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.held: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def post(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Mark:
        self.words.append(f"post {len(copies)}")
        self.held.append(list(copies))
        return None

    def wait(self, mark: Mark) -> None:
        self.words.append("wait")
        # Of one stream: in the order in which they were posted.
        for copies in self.held:
            super().post(copies)
        self.held.clear()


class Layer(nn.Module):
    """x + W2 gelu(W1 norm(x)), with the cheap functions marked."""

    def __init__(self, saved: SavedTensors) -> None:
        super().__init__()
        self.saved = saved
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(2))
        self.calls = {"norm": 0, "activation": 0}

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["norm"] += 1
        return torch.nn.functional.layer_norm(x, (WIDTH,))

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["activation"] += 1
        return torch.nn.functional.gelu(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.saved.recomputed("mlp", self.first)(self.saved.recomputed("norm", self.norm)(x))
        return x + self.second(self.saved.recomputed("activation", self.activation)(inner))


class Chain:
    """Layers as a chunk calls them."""

    def __init__(self, saved: SavedTensors, num_layers: int = 4, num_moved: int = 0) -> None:
        torch.manual_seed(3)
        self.saved, self.num_moved = saved, num_moved
        self.layers = [Layer(saved) for _ in range(num_layers)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = self.saved.run_layer(layer, x, moves=index < self.num_moved)
        return self.saved.end_chunk(x.square().sum())

    def weights(self) -> list[torch.Tensor]:
        return [parameter for layer in self.layers for parameter in layer.parameters()]

    def gradients(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(self.forward(x), [x, *self.weights()]))


def source() -> torch.Tensor:
    """A chunk's input that is no leaf."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(16, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True) * 1.0


def weights_of(chains: list[Chain]) -> Callable[[], list[torch.Tensor]]:
    return lambda: chains[0].weights()


def chain_that_moves(
    num_moved: int, parts: Sequence[str] = (), num_layers: int = 4
) -> tuple[Chain, HostMemory, Journal]:
    journal, chains = Journal(), []
    host = HostMemory(CPU, journal)
    chains.append(Chain(SavingHooks(parts, host, weights=weights_of(chains)), num_layers, num_moved))
    return chains[0], host, journal


PLAIN = SavedTensors()


@pytest.mark.parametrize("parts", [("norm",), ("activation",), ("norm", "activation"), ("norm", "activation", "mlp")])
@pytest.mark.parametrize("num_moved", [0, 3, 4])
def test_gradients_are_the_same_to_the_bit(parts: Sequence[str], num_moved: int) -> None:
    expected = Chain(PLAIN).gradients(source())
    chain, host, _ = chain_that_moves(num_moved, parts)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(chain.gradients(source()), expected, strict=True))
    assert (host.num_free > 0) == (num_moved > 0)


def test_what_several_have_saved_is_made_once() -> None:
    chain = Chain(SavingHooks(("norm", "activation", "mlp")), num_layers=1)
    chain.gradients(source())
    # The norm is made for the first product and for its weight's gradient, the product for two as well.
    assert chain.layers[0].calls == {"norm": 2, "activation": 2}
    plain = Chain(PLAIN, num_layers=1)
    plain.gradients(source())
    assert plain.layers[0].calls == {"norm": 1, "activation": 1}


def bytes_kept(chain: Chain) -> tuple[int, torch.Tensor]:
    """Live bytes that are there after a forward and were not before, and the loss that keeps them."""
    seen: list[StorageWeakRef] = []
    sizes: list[int] = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple) else (result,):
                if isinstance(value, torch.Tensor):
                    seen.append(StorageWeakRef(value.untyped_storage()))
                    sizes.append(value.untyped_storage().nbytes())
            return result

    x = source()
    with See():
        output = chain.forward(x)
    live = {ref.cdata: size for ref, size in zip(seen, sizes, strict=True) if not ref.expired()}
    own = {each.untyped_storage()._cdata for each in [x, output, *chain.weights()]}
    return sum(size for cdata, size in live.items() if cdata not in own), output


def test_what_is_made_again_is_not_in_memory() -> None:
    each = 16 * WIDTH * 8
    statistics = 4 * 2 * 16 * 8
    # Per layer: norm's output, the product, the activation's output; and the outputs of the layers.
    for parts, num_kept in (((), 3), (("norm",), 2), (("norm", "activation"), 1), (("norm", "activation", "mlp"), 0)):
        assert bytes_kept(Chain(SavingHooks(parts)))[0] == 4 * (num_kept + 1) * each + statistics, parts


def test_what_is_moved_is_in_host_memory_instead() -> None:
    kept, _ = bytes_kept(Chain(PLAIN))
    chain, host, _ = chain_that_moves(2)
    host.lane = InPlace()
    kept_and_moved, loss = bytes_kept(chain)
    assert host.num_free == 0
    loss.backward()
    # Of each of two layers: its input, the norm's output and two statistics, the product, the activation's output.
    assert host.num_free == 2 * 6
    # The first layer's input is still held here, beside its copy; buffers are whole pages.
    rounding = sum(vector.untyped_storage().nbytes() - vector.nbytes for vector in host.pool.vectors)
    assert kept_and_moved == kept + 16 * WIDTH * 8 + rounding
    bytes_kept(chain)
    assert host.num_free == 0, "the next microbatch takes the buffers again"


def test_host_memory_is_locked_in_the_first_step_only() -> None:
    locked = list[int]()

    class Lock(Pageable):
        def lock(self, memory: torch.Tensor) -> None:
            locked.append(memory.nbytes)

    chains: list[Chain] = []
    host = HostMemory(CPU, page_lock=Lock())
    chains.append(Chain(SavingHooks((), host, weights=weights_of(chains)), num_moved=2))
    for _ in range(3):
        chains[0].gradients(source())
        assert len(locked) == host.num_free == 2 * 6
    assert sum(locked) < host.pool.num_bytes + 12 * 4096


def test_weights_and_what_is_small_stay() -> None:
    for min_bytes, num_copies in ((1, 6), (16 * 8 + 1, 4), (2**30, 0)):
        journal, chains = Journal(), []
        host = HostMemory(CPU, journal)
        chains.append(Chain(SavingHooks((), host, min_bytes, weights_of(chains)), 2, 1))
        chains[0].forward(source())
        assert [word for word in journal.words if word != "wait"] == ([f"post {num_copies}"] if num_copies else [])


def test_a_leaf_stays_because_the_executor_holds_it() -> None:
    chain, _, journal = chain_that_moves(1)
    chain.forward(source().detach().requires_grad_())
    assert journal.words[0] == "post 5"


def test_layers_leave_under_the_next_forward_and_come_back_one_ahead() -> None:
    chain, _, journal = chain_that_moves(3)
    loss = chain.forward(source())
    # Each layer is waited for after the next one: its copies run under that.
    assert journal.words == ["post 6", "post 6", "wait", "post 6", "wait", "wait"]
    journal.words.clear()
    order: list[str] = []
    for index, layer in enumerate(chain.layers):
        layer.first.weight.register_hook(lambda grad, index=index: order.append(f"layer {index}: {journal.words}"))
    loss.backward()
    # Layer 2 comes back while layer 3, which is kept, is in its backward; then each under the one above it.
    assert order == [
        "layer 3: ['post 6']",
        "layer 2: ['post 6', 'wait', 'post 6']",
        "layer 1: ['post 6', 'wait', 'post 6', 'wait', 'post 6']",
        "layer 0: ['post 6', 'wait', 'post 6', 'wait', 'post 6', 'wait']",
    ]


def test_buffers_are_used_again_by_microbatches_in_flight_and_by_steps() -> None:
    chain, host, _ = chain_that_moves(2)
    for _ in range(3):
        losses = [chain.forward(source()) for _ in range(2)]
        for loss in losses:
            loss.backward()
        assert host.num_free == 2 * 2 * 6


@pytest.mark.parametrize("num_moved", [0, 3])
def test_nothing_is_left_that_only_the_collector_frees(num_moved: int) -> None:
    chain, _, _ = chain_that_moves(num_moved, ("norm", "activation", "mlp"))
    chain.gradients(source())
    gc.collect()
    gc.disable()
    try:
        before = {id(each) for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}
        chain.gradients(source())
        left = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and id(each) not in before]
        assert [tuple(each.shape) for each in left] == []
    finally:
        gc.enable()
    assert len(chain.saved._sources) == 0


def test_a_forward_without_gradients_saves_and_moves_nothing() -> None:
    chain, host, journal = chain_that_moves(3, ("norm",))
    with torch.no_grad():
        for layer in chain.layers:
            chain.saved.run_layer(layer, source(), moves=True)
    assert journal.words == [] and host.num_free == 0


def test_a_layer_that_is_recomputed_whole_moves_its_input() -> None:
    expected = Chain(PLAIN).gradients(source())
    journal = Journal()
    host = HostMemory(CPU, journal)
    saved = SavingHooks(("norm",), host)
    chain = Chain(saved)
    x = y = source()
    for index, layer in enumerate(chain.layers):
        y = saved.run_layer(layer, y, moves=index < 2, whole=True)
    loss = saved.end_chunk(y.square().sum())
    assert [word for word in journal.words if word != "wait"] == ["post 1", "post 1"]
    found = torch.autograd.grad(loss, x)
    assert torch.equal(found[0], expected[0])
    assert all(layer.calls["norm"] == 2 for layer in chain.layers)


@pytest.mark.gpu
@pytest.mark.card
@pytest.mark.parametrize("parts", [(), ("norm", "activation", "mlp")])
def test_a_gpu_copies_beside_its_work_and_never_waits(parts: Sequence[str]) -> None:
    """Long work on the computation's stream: a copy that does not wait for it, or memory that is used too early, shows."""
    device = torch.device("cuda")
    chains: list[Chain] = []
    host = HostMemory(device)
    chains.append(Chain(SavingHooks(parts, host, weights=weights_of(chains)), num_layers=6, num_moved=4))
    plain = Chain(PLAIN, num_layers=6)
    for chain in (chains[0], plain):
        for layer in chain.layers:
            layer.to(device)
    x = torch.randn(4096, WIDTH, dtype=torch.float64, device=device)

    def gradients(chain: Chain) -> list[torch.Tensor]:
        entry = x.clone().requires_grad_()
        torch.cuda._sleep(50_000_000)
        return list(torch.autograd.grad(chain.forward(entry * 1.0), [entry, *chain.weights()]))

    expected = gradients(plain)
    gradients(chains[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [gradients(chains[0]) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for each in found:
        assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=True))
    assert host.num_free > 0 and all(is_page_locked(buffer) for buffer in host.pool.vectors)
