"""Optimisers for tables with a row per annotator: dense Adam at the cost of a batch's rows, and several steps as one.

``R`` is the number of rows of a table, ``V`` of those visited.
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from textwrap import indent
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

CHUNK = 1 << 20
"""How many numbers of a table ``RowAdam.advance`` handles at a time when asked for all rows."""


@lru_cache(maxsize=16)
def _coasting(beta1: float, beta2: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """What is left of two sums when a row coasts for ever from step ``t`` on: q, β1, β2 ``(3, 1)``, and the sums.

    The sums are S(t) = Σ_{j≥1} q^(j-1) c(t+j), with the ratio q = β1/√β2 and c(t) = √(1-β2^t) / (1-β1^t), and the same
    with β1 for q and 1 / (1-β1^t) for c(t). Each pass doubles the terms summed, so that all takes a dozen vector
    operations. After 20/(1-β2) steps c is 1, to 1e-9, and the last entry stands for all later ones.

    >>> bases, S = _coasting(0.9, 0.999, torch.device("cpu"))
    >>> q, c = 0.9 / 0.999**0.5, lambda t: (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
    >>> abs(S[0, 7].item() - sum(q ** (j - 1) * c(7 + j) for j in range(1, 500))) < 1e-7
    True
    >>> bool(torch.allclose(S[:, -1], 1 / (1 - bases[:2, 0])))
    True
    """
    bases = torch.tensor([[beta1 / math.sqrt(beta2)], [beta1], [beta2]], dtype=torch.float64, device=device)
    terms = 1 << math.ceil(math.log2(20 / (1 - beta1 / math.sqrt(beta2))))  # q^terms < e^-20
    t = torch.arange(1, math.ceil(20 / (1 - beta2)) + terms + 1, dtype=torch.float64, device=device)
    sums, done = torch.stack([(1 - beta2**t).sqrt(), torch.ones_like(t)]) / (1 - beta1**t), 1
    while done < terms:  # sums[:, t] holds the first `done` terms
        sums, done = sums[:, :-done] + bases[:2] ** done * sums[:, done:], 2 * done
    return bases, sums


def _rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The rows ``(V,)`` that a sparse gradient has, each once, and their values ``(V, ...)``."""
    rows = grad._indices()[0]
    if (rows[1:] > rows[:-1]).all():  # as where a table was read once, without repeats: there is nothing to sum
        return rows, grad._values()
    grad = grad.coalesce()
    return grad.indices()[0], grad.values()


class RowAdam(Optimizer):
    """Adam of Kingma & Ba, *Adam: A Method for Stochastic Optimization*, ICLR 2015, for tables with sparse gradients.

    Adam moves every row in every step: without a gradient a row coasts on its momentum, and its second moment decays,
    so that a rare row takes longer strides. Dense Adam pays for this with all ``R`` rows a step; ``SparseAdam`` leaves
    it out. Here a row rests until it is needed, and is then caught up in closed form. Had it moments m, v at step s,
    dense Adam would in the next n steps have moved it by

        -lr Σ_{j=1..n} β1^j m / (1-β1^(s+j)) / (√(β2^j v / (1-β2^(s+j))) + ε)  ≈  -lr β1 m / (√(β2 v) / A + ε / B)

        A = Σ_{j=1..n} (β1/√β2)^(j-1) √(1-β2^(s+j)) / (1-β1^(s+j)),    B = Σ_{j=1..n} β1^(j-1) / (1-β1^(s+j)).

    A and B depend on s and n alone, and are differences of two entries of a table. The right side is exact for n = 1,
    where ε is negligible and where it prevails; between, it is about 1% off at worst. Missed steps are made with the
    present ``lr`` and ``betas``: a scheduler is followed to the letter by the rows of each batch, and by the others as
    of their next visit.

    Call ``advance(table, rows)`` before rows are read in training, and ``advance(table)`` before the table is evaluated
    or saved; what is read is then what dense Adam would have made.

    >>> ours, dense = torch.nn.Parameter(torch.zeros(3, 1)), torch.nn.Parameter(torch.zeros(3, 1))
    >>> rowwise, adam = RowAdam([ours], lr=0.1), torch.optim.Adam([dense], lr=0.1)
    >>> for row in torch.tensor([0, 1, 1, 1, 1]):
    ...     for table, optimizer in (ours, rowwise), (dense, adam):
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.embedding(row, table, sparse=table is ours).sum().backward()
    ...         optimizer.step()
    >>> [round(x, 3) for x in dense.flatten().tolist()]
    [-0.297, -0.345, 0.0]
    >>> [round(x, 3) for x in ours.flatten().tolist()]  # row 0 rests where its one gradient left it
    [-0.1, -0.345, 0.0]
    >>> rowwise.advance(ours)
    >>> [round(x, 3) for x in ours.flatten().tolist()]
    [-0.297, -0.345, 0.0]

    Args:
        params: tables ``(R, ...)``, with gradients sparse in their first axis.
        lr: learning rate.
        betas: decay of the first and of the second moment, β1 < √β2, or coasting would never end.
        eps: added to the root of the second moment.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add tables with their own ``lr``, ``betas`` or ``eps``."""
        super().add_param_group(param_group)
        beta1, beta2 = param_group["betas"]
        if not 0 <= beta1 < math.sqrt(beta2) < 1:
            raise ValueError(
                f"betas: expected 0 <= beta1 < sqrt(beta2) < 1, or coasting never ends; got {beta1}, {beta2}"
            )
        for table in param_group["params"]:
            if table.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"params: expected tables of float32 or float64, which can count steps; got {table.dtype}"
                )

    @torch.no_grad()
    def advance(self, param: Tensor, rows: Tensor | None = None) -> None:
        """Bring rows to the present step, as dense Adam would have with the zero gradients they had since.

        Rows already current are left as they are, bit by bit, and repeats do no harm.

        Args:
            param: a table ``(R, ...)`` of this optimiser.
            rows: ``(V,)`` those to advance; all, in chunks, if ``None``.
        """
        group = next((g for g in self.param_groups if any(p is param for p in g["params"])), None)
        if group is None:
            raise ValueError(f"param: expected a table of this optimiser, got another tensor {tuple(param.shape)}")
        if state := self.state.get(param):
            if rows is not None:
                self._advance(param, rows, state, group)
            else:
                for chunk in torch.arange(len(param), device=param.device).split(max(1, CHUNK // param[0].numel())):
                    self._advance(param, chunk, state, group)

    def _advance(self, param: Tensor, rows: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        step, (beta1, beta2) = state["step"].item(), group["betas"]
        since = state["last"].index_select(0, rows)  # (V,) s
        late = (since < step).nonzero().squeeze(-1)
        if not len(late):
            return
        if len(late) < len(rows):
            rows, since = rows.index_select(0, late), since.index_select(0, late)

        since = since.double()
        bases, sums = _coasting(beta1, beta2, param.device)
        start, end = since.long().clamp_(max=sums.shape[1] - 1), min(int(step), sums.shape[1] - 1)
        decay = bases ** (step - since)  # (3, V): q^n, β1^n, β2^n
        left = torch.addcmul(sums.index_select(1, start), decay[:2], sums[:, end, None], value=-1)  # (2, V): A, B
        shape = (-1, *[1] * (param.dim() - 1))
        over_a, over_b = left.reciprocal_().to(param.dtype).view(2, *shape)

        moments = state["moments"].index_select(0, rows)  # (V, 2, ...)
        m, v = moments.unbind(1)
        root = v.sqrt().mul_(over_a).add_(over_b, alpha=group["eps"] / math.sqrt(beta2))  # divided by √β2, as lr is
        new = param.index_select(0, rows).addcdiv_(m, root, value=-float(group["lr"]) * beta1 / math.sqrt(beta2))
        param.index_copy_(0, rows, new)
        moments.mul_(decay[1:].T.to(param.dtype).view(-1, 2, *shape[1:]))
        state["moments"].index_copy_(0, rows, moments)
        state["last"].index_fill_(0, rows, step)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of Adam for the rows that have a gradient; the others wait.

        An empty gradient counts as a step and a gradient of ``None`` does not, as in ``torch.optim``; a dense gradient
        is one for all rows.

        Args:
            closure: evaluates the model anew and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    def update(self) -> None:
        """The step itself, without the hooks that torch puts around ``step``: they cost as much as a tenth of it."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, self.state[param], group)

    def _step(self, param: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["moments"] = param.new_zeros(len(param), 2, *param.shape[1:])  # both of a row side by side: one read
            state["last"] = torch.zeros(len(param), device=param.device)  # loading casts to the table's dtype
        assert param.grad is not None
        if param.grad.is_sparse:
            rows, grad = _rows(param.grad)
        else:
            rows, grad = torch.arange(len(param), device=param.device), param.grad
        self._advance(param, rows, state, group)

        state["step"] += 1
        step, (beta1, beta2) = state["step"].item(), group["betas"]
        moments = state["moments"].index_select(0, rows)  # (V, 2, ...)
        m, v = moments.unbind(1)
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = v.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        new = param.index_select(0, rows).addcdiv_(m, root, value=-float(group["lr"]) / (1 - beta1**step))
        param.index_copy_(0, rows, new)
        state["moments"].index_copy_(0, rows, moments)
        state["last"].index_fill_(0, rows, step)


class Chained(Optimizer):
    """Several optimisers as one, for a loop that takes one.

    The parameter groups are those of the parts, in order, and the state is shared, so that schedulers, checkpoints and
    hooks see one ordinary optimiser. A group added later joins the last part.

    Args:
        optimizers: the parts, with no parameter in common.

    >>> table, linear = torch.nn.Embedding(9, 2, sparse=True), torch.nn.Linear(2, 1)
    >>> both = Chained([RowAdam(table.parameters(), lr=0.1), torch.optim.SGD(linear.parameters(), lr=0.2)])
    >>> [group["lr"] for group in both.param_groups]
    [0.1, 0.2]
    >>> linear(table(torch.tensor([4]))).sum().backward()
    >>> both.step()
    >>> sorted(both.state_dict()["state"][0])
    ['last', 'moments', 'step']
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        first, *others = (part.defaults for part in self.optimizers)
        shared = {key: value for key, value in first.items() if all(key in other for other in others)}
        super().__init__([group for part in self.optimizers for group in part.param_groups], shared)
        for part in self.optimizers:
            self.state.update(part.state)
        self._link()

    def _link(self) -> None:
        """Let the parts hold our groups and our state."""
        groups = iter(self.param_groups)
        for part in self.optimizers:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the last part, unless a part already has it."""
        if not any(param_group is group for part in self.optimizers for group in part.param_groups):
            self.optimizers[-1].add_param_group(param_group)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, into the parts too."""
        super().load_state_dict(state_dict)
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each part, after one evaluation of the closure.

        Args:
            closure: evaluates the model anew and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.optimizers:
            part.update() if isinstance(part, RowAdam) else part.step()
        return loss

    def __repr__(self) -> str:
        return "Chained(\n" + "".join(indent(f"{part!r}\n", "  ") for part in self.optimizers) + ")"
