"""Triton's interpreter without what it does again and again: the same results in a fraction of the time.

For each device function that a kernel calls it patches the language anew, which the launch has done; where a reduction
has a function of its own it calls that for every entry, which takes tensors as well; it computes sums, differences and
products of integers twice, for an assertion that it leaves out; it makes a table of all dtypes to look one up, and
numbers of its own for the shape of every tensor; it makes types of blocks and numbers beside tensors anew for each
operation; and it finds out what two tensors are computed as where they are alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def install() -> None:
    """Have kernels of this process interpreted so."""
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.ReduceOps.generic_reduce = _reduce
    interpreter._get_np_dtype = _numpy_dtype
    interpreter._patch_attr = _patch_attribute
    interpreter.TensorHandle.__init__ = _make_handle
    interpreter.InterpreterBuilder.binary_op = _compute
    tl.tensor.__init__ = _make_tensor
    tl.dtype.__eq__ = _are_equal
    tl.block_type.__new__ = _block_of
    tl.block_type.__init__ = _leave
    tl.block_type.__eq__ = _are_equal_blocks
    tl.block_type.with_element_ty = _with_entries
    core._unwrap_if_constexpr = _unwrap
    TritonSemantic.binary_op_type_checking_impl = _operands
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.cast = _cast
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


_patched: set[int] = set()


def _call(function: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
    """Run a device function; the modules of the language that functions of its module name are patched once."""
    names = id(function.fn.__globals__)
    if names not in _patched:
        _patched.add(names)
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


def _patch_attribute(owner: object, name: str, member: Callable[..., Any], _builder: object, scope: Any) -> None:
    """Have a function of the language called with the interpreter's semantics."""
    # Its wrapper asks for what is given here.
    function = getattr(member, "__wrapped__", member)
    semantic = interpreter.interpreter_semantic

    def call(*args: object, **kwargs: object) -> object:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


def _reduce(operation: interpreter.ReduceOps, tensors: tuple[Any, ...]) -> list[Any]:
    """Combine the halves of an axis, a power of two long, until one entry is left."""
    tensors, axis = operation.unravel(tensors, operation.axis)
    dtypes = [tensor.dtype for tensor in tensors]
    arrays = [tensor.handle.data for tensor in tensors]
    while (length := arrays[0].shape[axis]) > 1:
        halves = [half for part in zip(*(np.split(a, 2, axis) for a in arrays), strict=True) for half in part]
        found = operation.combine_fn.fn(*map(operation.to_tensor, halves, dtypes * 2))
        arrays = [tensor.handle.data for tensor in (found if isinstance(found, tuple) else (found,))]
        assert arrays[0].shape[axis] == length // 2
    if not operation.keep_dims:
        arrays = [array.squeeze(axis) for array in arrays]
    return [operation.to_tensor(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]


_numpy_dtypes: dict[str, np.dtype[Any]] = {}
_look_up = interpreter._get_np_dtype


def _numpy_dtype(kind: tl.dtype) -> np.dtype[Any]:
    """Return what entries of a type are kept as."""
    if kind.name not in _numpy_dtypes:  # types of pointers have no hash
        _numpy_dtypes[kind.name] = _look_up(kind)
    return _numpy_dtypes[kind.name]


def _make_tensor(tensor: tl.tensor, handle: object, kind: tl.dtype) -> None:
    """Make a tensor of a type."""
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = kind.sizes if kind.__class__ is tl.block_type else _SCALAR


_SCALAR = (tl.tuple([]), tl.constexpr(1))


def _make_handle(
    handle: interpreter.TensorHandle, data: np.ndarray, dtype: tl.dtype, attr: dict[str, Any] | None = None
) -> None:
    """Keep an array as a value of a type."""
    handle.data, handle.dtype, handle.attr = data, dtype, {} if attr is None else attr


# Types

_compare = tl.dtype.__eq__


def _are_equal(kind: tl.dtype, other: Any) -> bool:
    """Return whether two types are the same."""
    return kind.name == other.name if other.__class__ is tl.dtype else _compare(kind, other)


_compare_blocks = tl.block_type.__eq__


def _are_equal_blocks(kind: tl.block_type, other: object) -> bool:
    """Return the same of two of which one is of blocks."""
    return kind is other or _compare_blocks(kind, other)


_blocks: dict[tuple[Any, ...], tl.block_type] = {}
_describe = tl.block_type.__init__


def _block_of(_class: type, kind: tl.dtype, shape: Any) -> tl.block_type:
    """Return the type of blocks of a shape: one object for all of them."""
    key = (kind.name, *[_unwrap(length) for length in shape])
    found = _blocks.get(key)
    if found is None:
        found = object.__new__(tl.block_type)
        _describe(found, kind, shape)
        found.lengths = key[1:]
        found.sizes = tl.tuple([tl.constexpr(length) for length in key[1:]]), tl.constexpr(found.numel)
        _blocks[key] = found
    return found


def _with_entries(block: tl.block_type, kind: tl.dtype) -> tl.block_type:
    """Return the type of blocks of the same shape."""
    return _blocks.get((kind.name, *block.lengths)) or _block_of(tl.block_type, kind, block.shape)


def _leave(*_: object) -> None:
    """Leave a type as it was made."""


_unwrap_several = core._unwrap_if_constexpr


def _unwrap(value: Any) -> Any:
    """Return what a constant holds, or what each of several does."""
    if value.__class__ is tl.constexpr:
        return value.value
    return _unwrap_several(value) if isinstance(value, (list, tuple, tl.tuple)) else value


# Operands

_ALIKE = {"int1", "int32", "int64", "uint32", "uint64", "fp32", "fp64"}
"""Types of which two are computed as what they are."""

_numbers: dict[tuple[Any, ...], tl.tensor] = {}
_results: dict[tuple[str, str], tl.dtype] = {}
_check = TritonSemantic.binary_op_type_checking_impl


def _operands(
    semantic: TritonSemantic, left: Any, right: Any, *flags: bool, **named: bool
) -> tuple[tl.tensor, tl.tensor]:
    """Return two operands as tensors of one type and shape."""
    two = isinstance(left, tl.tensor), isinstance(right, tl.tensor)
    if two[0] and two[1]:
        kind, other = left.dtype, right.dtype
        if kind is other and kind.name in _ALIKE:
            return _broadcast(semantic, left, right)
        if kind.name in _ALIKE and other.name in _ALIKE and not flags and not named:
            key = kind.name, other.name
            if key not in _results:
                _results[key] = _check(semantic, left, right)[0].dtype
            result = _results[key]
            return _broadcast(semantic, _cast(semantic, left, result), _cast(semantic, right, result))
        if kind.__class__ is tl.pointer_type and other.is_int() and flags == (True, True):
            return _broadcast(semantic, left, right)
    if two[0] == two[1] or named:
        return _check(semantic, left, right, *flags, **named)
    tensor, number = (left, right) if two[0] else (right, left)
    # A number becomes the same beside all tensors of a type; as text, zeros of either sign differ.
    key = (tensor.type.name, two[0], number.__class__, repr(number), flags)
    found = _numbers.get(key)
    if found is None:
        pair = _check(semantic, left, right, *flags)
        if pair[two[1]] is tensor:
            _numbers[key] = pair[two[0]]
        return pair
    return (left, found) if two[0] else (found, right)


_cast_any = TritonSemantic.cast


def _cast(semantic: TritonSemantic, tensor: tl.tensor, kind: tl.dtype, *rounding: str | None) -> tl.tensor:
    """Return a tensor of a type of entries."""
    if tensor.dtype is kind:
        return tensor
    if tensor.dtype.name in _ALIKE and kind.name in _ALIKE and kind.name != "int1" and not any(rounding):
        handle = interpreter.TensorHandle(tensor.handle.data.astype(_numpy_dtype(kind)), kind)
        return tl.tensor(handle, tensor.type.with_element_ty(kind))
    return _cast_any(semantic, tensor, kind, *rounding)


_spread = TritonSemantic.broadcast_impl_value


def _broadcast(semantic: TritonSemantic, left: tl.tensor, right: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return two tensors of one shape."""
    if left.shape is right.shape:
        return left, right
    if not left.shape.values:
        return _splat(left, right.type), right
    if not right.shape.values:
        return left, _splat(right, left.type)
    return _spread(semantic, left, right)


def _splat(value: tl.tensor, like: tl.block_type) -> tl.tensor:
    """Return a block of one value."""
    data = np.full(like.lengths, value.handle.data, _numpy_dtype(value.dtype))
    return tl.tensor(interpreter.TensorHandle(data, value.dtype), like.with_element_ty(value.dtype))


_compute_any = interpreter.InterpreterBuilder.binary_op
_WIDTHS = {"int32": 4, "uint32": 4, "fp32": 4, "int64": 8, "uint64": 8, "fp64": 8}


def _compute(
    builder: interpreter.InterpreterBuilder,
    left: interpreter.TensorHandle,
    right: interpreter.TensorHandle,
    operation: Callable[..., np.ndarray],
) -> interpreter.TensorHandle:
    """Return what an operation makes of two values."""
    width = _WIDTHS.get(left.dtype.name)
    if width is None:
        return _compute_any(builder, left, right, operation)
    data = operation(left.data, right.data)
    if data.itemsize > width:
        data = data.astype(_numpy_dtype(left.dtype))
    return interpreter.TensorHandle(data, left.dtype)
