"""Fewer kernels for the same model: what transformers' modelling code computes apart and could at once.

Nothing here names an architecture. Projections that read the same input share one matrix; root mean
square norms, found by trying them, become one kernel, together with the residual addition before
them, or none where they stand between two projections. All of it is meant for a compiled forward: a
compiler pass merges the equal calls it leaves.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.functional import linear

from engine.norm import reference_rms_norm, rms_norm
from engine.projection import PART, can_defer_norm

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of projections that the modelling code of transformers applies to one input."""
MIN_NORM = 512
"""Narrower norms (of single heads) are left to the compiler, which fuses them with their neighbours."""


class Slice(nn.Module):
    """One of several projections whose weights are rows of one matrix.

    Every one of them computes the whole product, in one and the same expression: the compiler pass
    makes one call of them.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, begin: int, end: int) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.begin, self.end = begin, end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)[..., self.begin : self.end]


def fuse_projections(model: nn.Module) -> int:
    """Join sibling projections, in place; returns how many groups were joined."""
    joined = 0
    for parent in list(model.modules()):
        for names in SIBLINGS:
            parts = [getattr(parent, name, None) for name in names]
            if _joinable(parts):
                _join(parent, names, parts)
                joined += 1
    return joined


def _joinable(parts: Sequence[Any]) -> bool:
    return (
        all(type(part) is nn.Linear for part in parts)
        and len({part.in_features for part in parts}) == 1
        and len({part.bias is None for part in parts}) == 1
        and len({part.weight.dtype for part in parts}) == 1
    )


def _join(parent: nn.Module, names: Sequence[str], parts: Sequence[Any]) -> None:
    weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    biases = [part.bias for part in parts]
    bias = None if biases[0] is None else nn.Parameter(torch.cat(biases), requires_grad=False)
    begin = 0
    for name, part in zip(names, parts, strict=True):
        setattr(parent, name, Slice(weight, bias, begin, begin + part.out_features))
        begin += part.out_features


# Root mean square norms


class FusedNorm(nn.Module):
    """Root mean square norm over the last dimension as one call."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = rms_norm(x, self.weight, self.eps)
        return normed


@torch.no_grad()
def fuse_norms(model: nn.Module) -> int:
    """Replace, in place, the norms that compute what `rms_norm` computes; returns how many.

    Which ones do is found by trying: the names and formulas of norms differ between architectures.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            weight = getattr(child, "weight", None)
            if eps is None or weight is None or weight.dim() != 1 or len(weight) < MIN_NORM:
                continue
            if _is_rms_norm(child, weight, eps):
                setattr(parent, name, FusedNorm(weight, eps))
                replaced += 1
    return replaced


def _is_rms_norm(module: nn.Module, weight: nn.Parameter, eps: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, len(weight), generator=generator)
    kept = weight.detach().clone()
    # Drawn or fresh weights may all be 1, which says nothing.
    weight.copy_(torch.rand(len(weight), generator=generator) + 0.5)
    try:
        # As large as activations are, and so small that epsilon decides.
        tries = [(magnitude * x).to(weight) for magnitude in (1.0, max(eps, 1e-12) ** 0.5)]
        return all(close(module(each), reference_rms_norm(each, weight, eps)) for each in tries)
    except Exception:  # whatever it is, it takes something else
        return False
    finally:
        weight.copy_(kept)


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """But for a few roundings."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    tolerance = max(torch.finfo(wanted.dtype).eps, 1e-5)
    return bool((got.double() - wanted.double()).norm() <= tolerance * wanted.double().norm())


# The compiler pass


class FusionPass(CustomGraphPass):
    """Merges equal calls and residual additions into the norms after them, picks rows early, and makes norms
    a part of projections."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        merge_equal_calls(graph)
        merge_additions(graph)
        pick_rows_early(graph)
        defer_norms(graph)
        graph.eliminate_dead_code()

    def uuid(self) -> bytes:
        """Names this version of the pass, and of what else decides here, in the compiler's cache on disk."""
        folder = Path(__file__).parent
        sources = [(folder / name).read_bytes() for name in ("fusion.py", "compiler.py", "projection.py")]
        return hashlib.sha256(b"".join(sources)).digest()


_VIEWS = {
    torch.ops.aten.permute.default,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
}
_MERGED = _VIEWS | {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def merge_equal_calls(graph: torch.fx.Graph) -> int:
    """One matrix product where several have the same arguments; returns how many were dropped."""
    seen: dict[Any, torch.fx.Node] = {}
    dropped = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _MERGED:
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            dropped += node.target not in _VIEWS
    return dropped


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each) for each in value)
    return value


def merge_additions(graph: torch.fx.Graph) -> int:
    """`rms_norm(a + b)` becomes `add_rms_norm(a, b)`, which also gives the sum; returns how many."""
    merged = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.stepahead.rms_norm.default:
            continue
        total, weight, eps = node.args
        if not _is_addition(total):
            continue
        with graph.inserting_before(total):
            both = graph.call_function(
                torch.ops.stepahead.add_rms_norm.default, (*total.args, weight, eps), {}
            )
            both.meta["val"] = (node.meta["val"], total.meta["val"])
            parts = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]
        for part, old in zip(parts, (node, total), strict=True):
            part.meta["val"] = old.meta["val"]
            old.replace_all_uses_with(part)
            graph.erase_node(old)
        merged += 1
    return merged


def _is_addition(node: Any) -> bool:
    """Of two tensors of one shape and dtype, without a factor."""
    if not isinstance(node, torch.fx.Node) or node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return False
    values = [arg.meta.get("val") for arg in node.args if isinstance(arg, torch.fx.Node)]
    return len(values) == 2 and all(
        isinstance(v, torch.Tensor)
        and v.shape == node.meta["val"].shape
        and v.dtype == node.meta["val"].dtype
        for v in values
    )


_ROWWISE = {
    torch.ops.stepahead.rms_norm.default: 1,
    torch.ops.stepahead.add_rms_norm.default: 2,
    torch.ops.stepahead.project.default: 1,
}
"""Operations whose row i is made of row i of that many first arguments, all [1, T, ...]."""


def pick_rows_early(graph: torch.fx.Graph) -> int:
    """Rows that are picked at the end (those with logits) are picked before all that serves them alone.

    In a model that is what comes after the last attention, so a prompt's other tokens go without.
    Returns how many operations are done on the picked rows only. To be called after `merge_additions`,
    which makes operations by row of others, and before `defer_norms`: what `project_add` hands to
    `project` depends on the number of rows.
    """
    moved = 0
    for pick in list(graph.nodes):
        if pick.op != "call_function" or pick.target is not torch.ops.aten.index.Tensor:
            continue
        source, indices = pick.args
        # x[:, rows] of [1, T, n], by rows that are known from the start.
        if len(indices) != 2 or indices[0] is not None or indices[1].op != "placeholder":
            continue
        if source.meta["val"].dim() != 3:
            continue
        found = _used_only_for(pick)
        serving = [node for node in graph.nodes if node in found]
        picked: dict[Any, torch.fx.Node] = {}
        for node in serving:
            for i, arg in enumerate(node.args[: _ROWWISE.get(node.target, 0)]):
                if arg in found:
                    continue
                if arg not in picked:
                    with graph.inserting_before(node):
                        picked[arg] = graph.call_function(pick.target, (arg, indices))
                    _infer(picked[arg])
                node.update_arg(i, picked[arg])
            _infer(node)
        if serving:
            pick.replace_all_uses_with(source)
            graph.erase_node(pick)
        moved += sum(node.target in _ROWWISE for node in serving)
    return moved


def _used_only_for(pick: torch.fx.Node) -> set[Any]:
    """The operations by row that lead to the picked rows and to nothing else."""
    found: set[Any] = set()
    waiting: list[Any] = [pick.args[0]]
    while waiting:
        node = waiting.pop(0)
        parts = [node]
        if node.target is operator.getitem:
            node = node.args[0]
            parts = [*node.users, node]
        if node.target not in _ROWWISE or any(part in found for part in parts):
            continue
        users = {user for part in parts for user in part.users}
        if users <= {pick, *parts, *found}:
            found |= {*parts}
            waiting += node.args[: _ROWWISE[node.target]]
    return found


def _infer(node: torch.fx.Node) -> None:
    """Shape and dtype, of the arguments as they are now."""
    target: Any = node.target
    node.meta.pop("eager_input_vals", None)  # of the arguments that it had
    node.meta["val"] = target(*torch.fx.node.map_arg(node.args, lambda arg: arg.meta["val"]))


def defer_norms(graph: torch.fx.Graph) -> int:
    """A norm between projections becomes a part of both (`project_add`, `project`); returns how many."""
    project = torch.ops.stepahead.project.default
    deferred = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.stepahead.add_rms_norm.default:
            continue
        *added, weight, eps = node.args
        before = next((arg for arg in added if _is_plain_projection(arg) and len(arg.users) == 1), None)
        parts: dict[int, torch.fx.Node] = {part.args[1]: part for part in node.users}
        readers = [*parts[0].users] if 0 in parts else []
        if (
            before is None
            or not readers
            or not all(
                reader.target is project and reader.args[0] is parts[0] and reader.args[2] is None
                for reader in readers
            )
        ):
            continue
        x, matrix = before.args[:2]
        outputs, inputs = matrix.meta["val"].shape
        if not can_defer_norm(inputs, outputs, matrix.meta["val"].dtype):
            continue
        residual = added[1] if before is added[0] else added[0]
        with graph.inserting_before(node):
            three = graph.call_function(
                torch.ops.stepahead.project_add.default, (x, matrix, residual, weight, eps), {}
            )
            value = node.meta["val"][0]
            squares = value.new_empty(*value.shape[:-1], outputs // PART, dtype=torch.float32)
            three.meta["val"] = (*node.meta["val"], squares)
            made = [graph.call_function(operator.getitem, (three, i)) for i in range(3)]
        for part, val in zip(made, three.meta["val"], strict=True):
            part.meta["val"] = val
        for reader in readers:
            reader.args = (made[0], reader.args[1], made[2], eps, reader.args[4])
            reader.meta.pop("eager_input_vals", None)  # of the arguments that it had
        for i, part in parts.items():
            part.replace_all_uses_with(made[i])
            graph.erase_node(part)
        graph.erase_node(node)
        deferred += 1
    return deferred


def _is_plain_projection(node: Any) -> bool:
    return (
        isinstance(node, torch.fx.Node)
        and node.target is torch.ops.stepahead.project.default
        and node.args[2] is None
        and not node.args[4]
    )
