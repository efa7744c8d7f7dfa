"""What ranks run instead of gathers, scatters and slices at computed indices on whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from ftmesh.collectives.batch_layout import PARTIAL, SAME, BatchLayout
from ftmesh.collectives.batch_program import MixedExamplesError, Scope, bind, rule
from ftmesh.collectives.batch_rules import is_row_number


@rule("dynamic_slice")
def dynamic_slice(scope: Scope, eqn: Any) -> None:
    x, *starts = eqn.invars
    scope.sum_partial(*starts)
    layout, sizes = scope.layout(x), list(eqn.params["slice_sizes"])
    if not layout.is_rows:
        scope.emit_as_is(eqn, [layout], None)
        return
    if sizes[layout.dim] != x.aval.shape[layout.dim]:
        raise MixedExamplesError("takes some of the examples")
    sizes[layout.dim] = scope.ranks.length(layout)
    scope.emit_as_is(eqn, [layout], None, slice_sizes=tuple(sizes))


@rule("dynamic_update_slice")
def dynamic_update_slice(scope: Scope, eqn: Any) -> None:
    x, update, *starts = eqn.invars
    scope.sum_partial(*starts)
    layouts = scope.layouts_of((x, update))
    rows = {layout for layout in layouts if layout.is_rows}
    if not rows:
        out = PARTIAL if PARTIAL in layouts else SAME
        scope.emit_as_is(eqn, [out], [out, out, *[SAME] * len(starts)])
        return
    scope.sum_partial(x, update)
    layout = rows.pop()
    if rows or x.aval.shape[layout.dim] != update.aval.shape[layout.dim]:
        raise MixedExamplesError("writes to some of the examples")
    scope.emit_as_is(eqn, [layout], [layout, layout, *[SAME] * len(starts)])


def own_columns(scope: Scope, indices: Any, layout: BatchLayout) -> frozenset[int]:
    """The columns of an array of indices in which rows have their own number."""
    fact = scope.fact(indices)
    if fact.value is None:
        return fact.own_columns
    columns = range(indices.aval.shape[-1])
    return frozenset(c for c in columns if is_row_number(fact.value[..., c], layout.dim))


def _number_rows(indices: Any, layout: BatchLayout, columns: Sequence[int]) -> Any:
    """Write the numbers of rows on this rank into some columns of an array of indices."""
    for column in columns:
        shape = indices.shape[:-1]
        numbers = lax.broadcasted_iota(indices.dtype, shape, layout.dim)
        indices = indices.at[..., column].set(numbers)
    return indices


def _batch_dims(ndim: int, window_dims: Sequence[int]) -> list[int]:
    return [dim for dim in range(ndim) if dim not in window_dims]


def _find_own_index(
    scope: Scope, indices: Any, dims: Sequence[int], operand: Any, rows: BatchLayout | None
) -> tuple[int, int] | None:
    """A dimension of `indices` and the column in which its rows are numbers of operand rows.

    `dims` are the operand's dimensions for columns, `rows` the layout of the operand or None.
    """
    layout = scope.layout(indices)
    for dim in range(indices.aval.ndim - 1):
        if layout.is_rows and layout.dim != dim:
            continue
        at = BatchLayout(layout.spread, dim)
        for column in sorted(own_columns(scope, indices, at)):
            target = dims[column]
            same_length = operand.aval.shape[target] == indices.aval.shape[dim]
            if same_length and (rows is None or target == rows.dim):
                return dim, column
    return None


@rule("gather")
def gather(scope: Scope, eqn: Any) -> None:
    operand, indices = eqn.invars
    scope.sum_partial(operand, indices)
    rows, index_rows = scope.layouts_of(eqn.invars)
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batch_dims = _batch_dims(eqn.outvars[0].aval.ndim, numbers.offset_dims)
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    if rows.is_same and index_rows.is_same:
        scope.emit_as_is(eqn, [SAME], None)
        return
    if index_rows.is_rows and index_rows.dim == indices.aval.ndim - 1:
        raise MixedExamplesError("uses examples as the parts of one index")
    if not rows.is_rows:  # such as an embedding, at indices of each example
        wanted = [SAME, index_rows]
        for dim, index_dim in batching.items():
            if index_dim == index_rows.dim:
                wanted[0] = index_rows.moved_to(dim)
        scope.emit_as_is(eqn, [index_rows.moved_to(batch_dims[index_rows.dim])], wanted)
        return
    if rows.dim in batching:
        at = rows.moved_to(batching[rows.dim])
        if index_rows.is_rows and index_rows != at:
            raise MixedExamplesError("picks from examples by the indices of others")
        scope.emit_as_is(eqn, [rows.moved_to(batch_dims[at.dim])], [rows, at])
        return
    if rows.dim in numbers.start_index_map:
        own = _find_own_index(scope, indices, numbers.start_index_map, operand, rows)
        if own is None or sizes[rows.dim] != 1 or (index_rows.is_rows and index_rows.dim != own[0]):
            raise MixedExamplesError("picks examples by index")
        at, columns = rows.moved_to(own[0]), [own[1]]

        def run(x: Any, index: Any) -> list[Any]:
            return bind(
                eqn, [x, _number_rows(scope.ranks.convert(index, index_rows, at), at, columns)]
            )

        if index_rows.is_rows and index_rows != at:
            raise MixedExamplesError("picks examples by index")
        scope.emit(eqn, [rows.moved_to(batch_dims[at.dim])], run)
        return
    if index_rows.is_rows or rows.dim in numbers.collapsed_slice_dims:
        raise MixedExamplesError("picks from examples by the indices of others")
    if sizes[rows.dim] != operand.aval.shape[rows.dim]:
        raise MixedExamplesError("takes some of the examples")
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    offset = sum(dim not in removed for dim in range(rows.dim))
    local = list(sizes)
    local[rows.dim] = scope.ranks.length(rows)
    out = rows.moved_to(numbers.offset_dims[offset])
    scope.emit_as_is(eqn, [out], None, slice_sizes=tuple(local))


@rule("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub")
def scatter(scope: Scope, eqn: Any) -> None:
    operand, indices, updates = eqn.invars
    scope.sum_partial(indices)
    is_sum = eqn.primitive.name == "scatter-add"
    layouts = scope.layouts_of(eqn.invars)
    if all(layout.is_same for layout in layouts):  # also a rank's own, in a shard_map
        scope.emit_as_is(eqn, [SAME], None)
        return
    if not any(layout.is_rows for layout in layouts):
        if is_sum:
            scope.emit_as_is(eqn, [PARTIAL], [PARTIAL, SAME, PARTIAL])
        else:
            scope.sum_partial(operand, updates)
            scope.emit_as_is(eqn, [SAME], None)
        return
    if layouts[1].is_rows and layouts[1].dim == indices.aval.ndim - 1:
        raise MixedExamplesError("uses examples as the parts of one index")
    places = ScatterPlaces(scope, eqn)
    wanted, columns = places.find()
    if any(have.is_rows and have != want for have, want in zip(layouts, wanted, strict=True)):
        raise MixedExamplesError("writes examples to the rows of others")
    if not wanted[0].is_rows and not is_sum:
        raise MixedExamplesError("writes all examples to the same place")
    if wanted[0].is_rows:
        scope.sum_partial(operand, updates)
    else:
        scope.sum_partial(updates)
        wanted = [PARTIAL, *wanted[1:]]
    ranks, sources = scope.ranks, scope.layouts_of(eqn.invars)

    def run(*operands: Any) -> list[Any]:
        x, index, update = map(ranks.convert, operands, sources, wanted)
        if not wanted[0].is_rows:
            update = ranks.mask_rows(update, wanted[2], 0)
        return bind(eqn, [x, _number_rows(index, wanted[1], columns), update])

    scope.emit(eqn, [wanted[0]], run)


class ScatterPlaces:
    """Finds which dimensions of the operands of a scatter are the examples."""

    def __init__(self, scope: Scope, eqn: Any) -> None:
        self.scope, self.eqn = scope, eqn
        self.operand, self.indices, self.updates = eqn.invars
        self.numbers = eqn.params["dimension_numbers"]
        numbers = self.numbers
        self.scatter_dims = _batch_dims(self.updates.aval.ndim, numbers.update_window_dims)
        removed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        window = [dim for dim in range(self.operand.aval.ndim) if dim not in removed]
        self.window_dims = dict(zip(window, numbers.update_window_dims, strict=True))

    def find(self) -> tuple[list[BatchLayout], list[int]]:
        """The layouts of the operands, and the columns of indices that number rows."""
        numbers = self.numbers
        rows, index_rows, update_rows = self.scope.layouts_of(self.eqn.invars)
        any_rows = next(x for x in (rows, index_rows, update_rows) if x.is_rows)
        index_dim = None  # the dimension of indices along which there are examples
        if index_rows.is_rows:
            index_dim = index_rows.dim
        elif update_rows.is_rows and update_rows.dim in self.scatter_dims:
            index_dim = self.scatter_dims.index(update_rows.dim)
        batching = dict(
            zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
        )
        if rows.is_rows and rows.dim in batching.values():
            index_dim = next(i for i, dim in batching.items() if dim == rows.dim)
        if index_dim is not None and index_dim in batching:
            return self._along(any_rows, batching[index_dim], index_dim), []
        own = _find_own_index(
            self.scope, self.indices, numbers.scatter_dims_to_operand_dims, self.operand,
            rows if rows.is_rows else None,
        )  # fmt: skip
        if own is not None and index_dim in (None, own[0]) and not self._is_window(update_rows):
            target = numbers.scatter_dims_to_operand_dims[own[1]]
            if target in numbers.inserted_window_dims:
                return self._along(any_rows, target, own[0]), [own[1]]
        if index_dim is not None:  # added up at places that any example may have
            if rows.is_rows:
                raise MixedExamplesError("writes examples to the rows of others")
            layout = index_rows if index_rows.is_rows else update_rows
            return [
                SAME, layout.moved_to(index_dim), layout.moved_to(self.scatter_dims[index_dim])
            ], []  # fmt: skip
        return self._along_window(rows, update_rows), []

    def _is_window(self, update_rows: BatchLayout) -> bool:
        return update_rows.is_rows and update_rows.dim in self.numbers.update_window_dims

    def _along(self, rows: BatchLayout, dim: int, index_dim: int) -> list[BatchLayout]:
        return [
            rows.moved_to(dim),
            rows.moved_to(index_dim),
            rows.moved_to(self.scatter_dims[index_dim]),
        ]

    def _along_window(self, rows: BatchLayout, update_rows: BatchLayout) -> list[BatchLayout]:
        """Examples are a dimension that is written as a whole."""
        if rows.is_rows:
            dim = rows.dim
        else:
            dim = next((d for d, w in self.window_dims.items() if w == update_rows.dim), -1)
        at = self.window_dims.get(dim, -1)
        is_indexed = dim in self.numbers.scatter_dims_to_operand_dims
        if at < 0 or is_indexed or self.operand.aval.shape[dim] != self.updates.aval.shape[at]:
            raise MixedExamplesError("writes to some of the examples")
        layout = rows if rows.is_rows else update_rows
        return [layout.moved_to(dim), SAME, layout.moved_to(at)]
