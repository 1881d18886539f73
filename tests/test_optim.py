"""Row-wise Adam is dense Adam, at the price of a batch; several optimisers are one."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lfc.optim import Chained, RowAdam


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sparse(rows: Tensor, values: Tensor, size: int) -> Tensor:
    """A gradient for some rows, as ``F.embedding(..., sparse=True)`` makes it."""
    return torch.sparse_coo_tensor(rows[None], values, (size, *values.shape[1:]), check_invariants=True)


def visit(optimizer: RowAdam, table: nn.Parameter, rows: Tensor, gradient: Callable[[Tensor], Tensor]) -> None:
    """One training step as a model makes it: advance, read, differentiate, step."""
    optimizer.advance(table, rows)
    table.grad = sparse(rows, gradient(table.detach()[rows]), len(table))
    optimizer.step()


# --- RowAdam ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 3), (6, 2, 3), (6,)])
@pytest.mark.parametrize("layout", ["sparse", "dense"])
def test_is_adam_when_every_row_has_a_gradient(shape: tuple[int, ...], layout: str) -> None:
    torch.manual_seed(0)
    ours, adams = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.empty(shape))
    adams.data.copy_(ours.data)
    settings: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.99), "eps": 1e-6}
    optimizers = [RowAdam([ours], **settings), torch.optim.Adam([adams], **settings)]
    for _ in range(300):
        grad = torch.randn(shape)
        order = torch.randperm(len(grad))
        ours.grad = sparse(order, grad[order], len(grad)) if layout == "sparse" else grad.clone()
        adams.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    assert (adams - ours).abs().max() < 1e-6 * adams.abs().max()


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99), (0.8, 0.9), (0.95, 0.95), (0.9, 0.99999)])
@pytest.mark.parametrize(("before", "gap"), [(0, 1), (0, 7), (3, 40), (60, 500), (800, 12)])
def test_closed_form_is_the_loop(betas: tuple[float, float], before: int, gap: int) -> None:
    beta1, beta2 = betas
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    optimizer = RowAdam([table], lr=0.1, betas=betas)
    for _ in range(before):  # steps of others, before the row is first seen
        table.grad = sparse(torch.tensor([2]), torch.randn(1, 4).double(), 3)
        optimizer.step()
    table.grad = sparse(torch.tensor([1]), torch.randn(1, 4).double(), 3)
    optimizer.step()

    state = optimizer.state[table]
    p, (m, v) = table.data[1].clone(), state["moments"][1].clone()
    start = p.clone()
    for t in range(before + 2, before + 2 + gap):
        m, v = beta1 * m, beta2 * v
        p -= 0.1 * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + 1e-8)

    for _ in range(gap):
        table.grad = sparse(torch.tensor([2]), torch.randn(1, 4).double(), 3)
        optimizer.step()
    assert torch.equal(table[1], start)  # costs nothing until asked for
    optimizer.advance(table, torch.tensor([1, 1]))
    torch.testing.assert_close(table.data[1] - start, p - start, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(state["moments"][1, 0], m)
    torch.testing.assert_close(state["moments"][1, 1], v)


@pytest.mark.parametrize(("scale", "tolerance"), [(1e-11, 1e-4), (1e-7, 2e-2), (1e-6, 2e-2), (1e-5, 2e-2), (1, 1e-4)])
def test_eps_where_gradients_are_as_small(scale: float, tolerance: float) -> None:
    ours, adams = nn.Parameter(torch.zeros(2, 4).double()), nn.Parameter(torch.zeros(2, 4).double())
    optimizers = [RowAdam([ours], eps=1e-6), torch.optim.Adam([adams], eps=1e-6)]
    for row in [0] * 5 + [1] * 100:
        ours.grad = sparse(torch.tensor([row]), scale * torch.tensor([[1.0, 2.0, 3.0, 4.0]]).double(), 2)
        adams.grad = ours.grad.to_dense()
        for optimizer in optimizers:
            optimizer.step()
    optimizers[0].advance(ours)  # type: ignore[attr-defined]
    torch.testing.assert_close(ours, adams, rtol=tolerance, atol=0)


def test_rare_rows_are_those_of_dense_adam() -> None:
    torch.manual_seed(0)
    chance = torch.tensor([1.0, 0.3, 0.05, 0.005]).repeat_interleave(16)  # (R,)
    start, target = torch.randn(64, 8), torch.randn(64, 8)
    curvature = torch.rand(64, 8) + 0.5
    names = ("ours", "dense", "lazy")
    tables = {name: nn.Parameter(start.clone()) for name in names}
    ours = RowAdam([tables["ours"]], lr=0.01)
    dense = torch.optim.Adam([tables["dense"]], lr=0.01)
    lazy = torch.optim.SparseAdam([tables["lazy"]], lr=0.01)
    for _ in range(2000):
        rows = (torch.rand(64) < chance).nonzero()[:, 0]
        noise = torch.randn(len(rows), 8)

        def gradient(read: Tensor, rows: Tensor = rows, noise: Tensor = noise) -> Tensor:
            return curvature[rows] * (read - target[rows]) + noise

        visit(ours, tables["ours"], rows, gradient)
        tables["lazy"].grad = sparse(rows, gradient(tables["lazy"].detach()[rows]), 64)
        lazy.step()
        tables["dense"].grad = torch.zeros(64, 8).index_copy_(0, rows, gradient(tables["dense"].detach()[rows]))
        dense.step()
    ours.advance(tables["ours"])

    moved = (tables["dense"] - start).norm(dim=1)

    def deviation(name: str) -> Tensor:
        return ((tables[name] - tables["dense"]).norm(dim=1) / moved).view(4, 16).amax(1).detach()

    assert deviation("ours").max() < 2e-5  # 4e-6 here: rounding
    assert deviation("lazy")[-1] > 0.3  # 0.76 here


def test_advancing_often_is_advancing_once() -> None:
    torch.manual_seed(0)
    table, twin = nn.Parameter(torch.randn(50, 3)), nn.Parameter(torch.empty(50, 3))
    twin.data.copy_(table.data)
    often, once = RowAdam([table], lr=0.1), RowAdam([twin], lr=0.1)
    often.advance(table)  # before any step: nothing to do
    for step in range(100):
        rows = torch.arange(49) if step < 3 else torch.tensor([0])  # the last row never
        table.grad = twin.grad = sparse(rows, torch.randn(len(rows), 3), 50)
        often.step()
        once.step()
        often.advance(table, torch.tensor([7, 7, 7, 9, 49]))
    often.advance(table)  # some rows late, some current
    once.advance(twin)
    torch.testing.assert_close(table, twin, rtol=1e-5, atol=1e-6)

    kept = twin.detach().clone()
    once.advance(twin)
    assert torch.equal(twin, kept)


def test_all_rows_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = []
    for chunk in (1 << 20, 7):
        monkeypatch.setattr("lfc.optim.CHUNK", chunk)
        torch.manual_seed(0)
        table = nn.Parameter(torch.randn(23, 3))
        optimizer = RowAdam([table])
        for rows in (torch.arange(23), torch.tensor([4]), torch.tensor([4])):
            visit(optimizer, table, rows, torch.sin)
        optimizer.advance(table)
        assert optimizer.state[table]["last"].eq(3).all()
        tables.append(table.detach())
    assert torch.equal(*tables)


def test_repeats_in_a_gradient_add_up() -> None:
    one, two = nn.Parameter(torch.zeros(5, 2)), nn.Parameter(torch.zeros(5, 2))
    one.grad = sparse(torch.tensor([3, 1, 3]), torch.tensor([[1.0, 2.0], [1.0, 1.0], [-3.0, 2.0]]), 5)
    two.grad = sparse(torch.tensor([1, 3]), torch.tensor([[1.0, 1.0], [-2.0, 4.0]]), 5)
    for table in (one, two):
        RowAdam([table], lr=1.0).step()
    assert torch.equal(one, two)
    assert one[3, 0] > 0 > one[3, 1]


def test_empty_gradient_counts_and_none_does_not() -> None:
    table, dense = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(4, 2))
    ours, adam = RowAdam([table]), torch.optim.Adam([dense])
    for rows in ([0, 2], [], None, [2], []):
        index = torch.tensor(rows or [], dtype=torch.long)
        table.grad = None if rows is None else sparse(index, torch.ones(len(index), 2), 4)
        dense.grad = None if table.grad is None else table.grad.to_dense()
        ours.step()
        adam.step()
    assert ours.state[table]["step"] == 4
    ours.advance(table)
    torch.testing.assert_close(table, dense)


def test_cost_is_that_of_the_rows_visited() -> None:
    """No operation of a step makes a tensor as long as the table."""
    size, largest = 10_000, 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.data_ptr() not in own:
                    largest = max(largest, tensor.numel())
            return out

    table = nn.Parameter(torch.randn(size, 2))
    optimizer = RowAdam([table])
    visit(optimizer, table, torch.arange(50), torch.sin)
    visit(optimizer, table, torch.arange(1), torch.sin)  # also fills the cache of S
    own = {tensor.data_ptr() for tensor in (table, *optimizer.state[table].values())}
    with Largest():
        visit(optimizer, table, torch.arange(20, 70), torch.sin)
        optimizer.zero_grad()
    assert 100 <= largest < size
    with Largest():
        optimizer.advance(table)
    assert largest >= size  # the probe can see


def test_follows_a_scheduler() -> None:
    torch.manual_seed(0)
    ours, adams = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(4, 2))
    optimizers = [Chained([RowAdam([ours])]), torch.optim.Adam([adams])]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=50) for o in optimizers]  # lr and β1
    for _ in range(50):
        adams.grad = torch.randn(4, 2)
        ours.grad = sparse(torch.arange(4), adams.grad, 4)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(ours, adams, rtol=1e-5, atol=1e-6)


def test_errors_name_the_argument() -> None:
    table = nn.Parameter(torch.ones(4, 2))
    with pytest.raises(ValueError, match="betas"):
        RowAdam([table], betas=(0.9, 0.8))
    with pytest.raises(ValueError, match="bfloat16"):
        RowAdam([nn.Parameter(table.data.bfloat16())])
    with pytest.raises(ValueError, match="param"):
        RowAdam([table]).advance(torch.ones(4, 2))


# --- Chained ------------------------------------------------------------------------------------------------------


class Crowd(nn.Module):
    """Scores of a linear layer, weighed by the row of who is asked."""

    def __init__(self, annotators: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.table = nn.Embedding(annotators, 3, sparse=True)
        self.rows = RowAdam(self.table.parameters(), lr=0.05)
        self.optimizer = Chained([self.rows, torch.optim.Adam(self.linear.parameters(), lr=0.02, fused=True)])

    def forward(self, inputs: Tensor, item: Tensor, annotator: Tensor) -> Tensor:
        self.rows.advance(self.table.weight, annotator)
        score = (self.linear(inputs)[item] * self.table(annotator)).sum(1)  # (A,)
        return ((score - 1) ** 2).sum() / len(inputs) + self.linear(inputs).square().mean()


def batch(seed: int, annotations: int, annotators: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Random inputs ``(4, 5)``, items and annotators of ``annotations``."""
    g = torch.Generator().manual_seed(seed)
    item, annotator = (torch.randint(high, (annotations,), generator=g) for high in (4, annotators))
    return torch.randn(4, 5, generator=g), item, annotator


def fit(model: Crowd, seeds: range, schedule: torch.optim.lr_scheduler.LRScheduler | None = None) -> None:
    for seed in seeds:
        model.optimizer.zero_grad()
        model(*batch(seed, annotations=seed % 4)).backward()  # each fourth batch has none
        model.optimizer.step()
        if schedule is not None:
            schedule.step()


def test_chained_resumes_bit_by_bit() -> None:
    def build() -> tuple[Crowd, torch.optim.lr_scheduler.LRScheduler]:
        model = Crowd()
        return model, torch.optim.lr_scheduler.CosineAnnealingLR(model.optimizer, T_max=60)

    (whole, schedule), (first, its), (second, later) = build(), build(), build()
    fit(whole, range(60), schedule)
    fit(first, range(31), its)
    file = io.BytesIO()
    torch.save([x.state_dict() for x in (first, first.optimizer, its)], file)
    file.seek(0)
    weights, optimizer, position = torch.load(file, weights_only=True)
    second.load_state_dict(weights)
    second.optimizer.load_state_dict(optimizer)
    later.load_state_dict(position)
    fit(second, range(31, 60), later)
    for one, two in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
    for part in second.optimizer.optimizers:
        assert part.state is second.optimizer.state
    groups = [group for part in second.optimizer.optimizers for group in part.param_groups]
    assert all(a is b for a, b in zip(groups, second.optimizer.param_groups, strict=True))
    assert not torch.equal(first.table.weight, whole.table.weight)


def test_chained_is_its_parts() -> None:
    chained, apart = Crowd(), Crowd()
    alone = [RowAdam(apart.table.parameters(), lr=0.05), torch.optim.Adam(apart.linear.parameters(), lr=0.02)]
    apart.rows = alone[0]  # type: ignore[assignment]
    fit(chained, range(20))
    for seed in range(20):
        apart.zero_grad()
        apart(*batch(seed, annotations=seed % 4)).backward()
        for optimizer in alone:
            optimizer.step()
    for one, two in zip(chained.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_chained_takes_over_the_state_of_its_parts() -> None:
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    parts = [torch.optim.Adam([weight]) for weight in weights]
    for weight, part in zip(weights, parts, strict=True):
        weight.grad = torch.ones(2)
        part.step()
    chained = Chained(parts)
    chained.step()
    assert [chained.state[weight]["step"] for weight in weights] == [2, 2]


def test_chained_closure_hooks_and_repr() -> None:
    model, calls = Crowd(), []
    model.optimizer.register_step_post_hook(lambda *_: calls.append("hook"))

    def closure() -> float:
        calls.append("closure")
        model.optimizer.zero_grad()
        loss = model(*batch(1, annotations=3))
        loss.backward()
        return loss.item()

    before, expected = model.table.weight.detach().clone(), model(*batch(1, annotations=3)).item()
    assert model.optimizer.step(closure) == pytest.approx(expected)
    assert calls == ["closure", "hook"]
    assert not torch.equal(before, model.table.weight)
    assert "RowAdam" in repr(model.optimizer) and "Adam" in repr(model.optimizer)
    model.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_chained_group_added_later_joins_the_last() -> None:
    model, extra = Crowd(), nn.Parameter(torch.ones(3))
    model.optimizer.add_param_group({"params": [extra], "lr": 0.5})
    extra.grad = torch.ones(3)
    model.optimizer.step()
    torch.testing.assert_close(extra.data, torch.full((3,), 0.5))
    assert len(model.optimizer.param_groups) == 3 and len(model.rows.param_groups) == 1
    model.optimizer.load_state_dict(model.optimizer.state_dict())
    assert len(model.optimizer.optimizers[-1].param_groups) == 2
    with pytest.raises(ValueError, match="more than one"):
        Chained([torch.optim.SGD([extra]), torch.optim.SGD([extra])])


# --- Two processes ------------------------------------------------------------------------------------------------

COUNTS = [(3, 2), (0, 4), (1, 1), (5, 0), (2, 2), (0, 0)] * 5
"""Annotations of each rank in each step; rows of a rank are often strange to the other."""


def train_rank(rank: int, folder: str) -> None:
    """One process of two: its own batches, its copy of the model."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = Crowd()
    parallel = nn.parallel.DistributedDataParallel(model)
    for step, counts in enumerate(COUNTS):
        model.optimizer.zero_grad()
        parallel(*batch(2 * step + rank, counts[rank])).backward()
        model.optimizer.step()
    model.rows.advance(model.table.weight)
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_are_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_rank, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]

    model = Crowd()
    model.table.sparse = False  # the one process is plain dense Adam
    dense = torch.optim.Adam(
        [{"params": model.table.parameters(), "lr": 0.05}, {"params": model.linear.parameters(), "lr": 0.02}]
    )
    for step, counts in enumerate(COUNTS):
        dense.zero_grad()
        losses = [model(*batch(2 * step + rank, counts[rank])) for rank in (0, 1)]
        torch.stack(losses).mean().backward()
        dense.step()
    for name, value in model.state_dict().items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        torch.testing.assert_close(ranks[0][name], value, rtol=0, atol=1e-6)
