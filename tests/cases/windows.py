"""Steps of every kind over layers with sliding windows, and what each of their rows must compute.

test_functions.py runs them on CPUs, kernels.py by the CUDA kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kv_cache import Window

# kind of step -> rows, slots of the window
KINDS = {"token": (1, 1), "chain": (12, 12), "tree": (20, 20), "level": (5, 24), "chunk": (70, 70)}
SIZES = (1, 2, 5, 16, 1000)  # tokens that a layer sees


class Step(NamedTuple):
    """Queries, a cache and a window, whose rows see `paths[b][t]`, slots in the order of the text."""

    q: Tensor  # [B, T, H, E]
    k: Tensor  # [B, Hkv, S, E]
    v: Tensor  # [B, Hkv, S, E]
    window: Window
    paths: list[list[list[int]]]

    def alone(self, b: int, t: int, size: int) -> tuple[Tensor, ...]:
        """Return operands of the row decoded by itself, after its path was accepted."""
        path = self.paths[b][t]
        k = self.k[b : b + 1].clone()
        v = self.v[b : b + 1].clone()
        k[:, :, : len(path)] = self.k[b, :, path]
        v[:, :, : len(path)] = self.v[b, :, path]
        start = torch.tensor([len(path) - 1])
        first = torch.tensor([[max(len(path) - size, 0)]])
        return self.q[b : b + 1, t : t + 1], k, v, start, torch.ones(1, 1, 1).bool(), first


def random_step(kind: str, starts: list[int], heads: tuple[int, int], E: int) -> Step:
    """Return a step of a kind; slots behind the windows are not numbers."""
    g = torch.Generator().manual_seed(len(kind) + E)
    rows, width = KINDS[kind]
    B, S = len(starts), max(starts) + width + 3
    q = torch.randn(B, rows, heads[0], E, generator=g)
    k, v = (torch.randn(B, heads[1], S, E, generator=g) for _ in range(2))
    mask = torch.zeros(B, rows, width, dtype=torch.bool)
    paths: list[list[list[int]]] = []
    for b, start in enumerate(starts):
        k[b, :, start + width :] = v[b, :, start + width :] = float("nan")
        nodes = [[0]]
        for node in range(1, width):
            parent = node - 1
            if kind in ("tree", "level"):
                parent = int(torch.randint(max(0, node - 4), node, (1,), generator=g))
            nodes.append([*nodes[parent], node])
        nodes = nodes[-rows:]  # a level of a draft head has those before it in its window
        for row, path in enumerate(nodes):
            mask[b, row, path] = True
        paths.append([[*range(start), *(start + node for node in path)] for path in nodes])
    start = torch.tensor(starts)
    slots = start[:, None] + torch.arange(width - rows, width)
    return Step(q, k, v, Window(slots, start, mask), paths)


def expected(step: Step, size: int, scale: float) -> Tensor:
    """Return the softmax of each row over the last `size` tokens of its path, in fp64."""
    B, T, H, _ = step.q.shape
    group = H // step.k.shape[1]
    y = torch.empty(*step.q.shape, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            seen = step.paths[b][t][-size:]
            k = step.k[b, :, seen].double().repeat_interleave(group, 0)  # [H, size, E]
            v = step.v[b, :, seen].double().repeat_interleave(group, 0)
            weights = (k @ step.q[b, t, :, :, None].double() * scale).softmax(1)  # [H, size, 1]
            y[b, t] = (weights * v).sum(1)
    return y.flatten(2)
