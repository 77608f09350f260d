"""Inlines calls of private functions, so that each op of main stands for one value.

MLIR's own `inline` pass does nothing here: jaxlib does not register the func dialect's inliner interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from autoshard.stablehlo.context import entry_block, functions_of, ops_inside

_C = TypeVar("_C")


def inline_calls(
    module: Any, context_of: Callable[[Any, _C | None], _C | None], note: Callable[[Any, _C | None], None]
) -> None:
    """Inline every `func.call` in the module's main, in place, callees' own calls too.

    Args:
        module: MLIR module, in the current MLIR context.
        context_of: (op, context of the call that it is inlined for, or None) -> the op's own context.
        note: called with each op of main that is no call (in its place after inlining), and its context.
    """
    functions = functions_of(module)
    check_calls(functions)
    for view in list(entry_block(functions["main"]).operations):
        op = view.operation
        context = context_of(op, None)
        if op.name == "func.call":
            results = _copy_body(functions, op, list(op.operands), context, context_of, note)
            for old, new in zip(op.results, results, strict=True):
                old.replace_all_uses_with(new)
            op.erase()
        else:
            note(op, context)


MOST_OPS = 20_000_000
"""Most ops of a program after inlining."""
_CALLEE = {"func.call": "callee", "stablehlo.composite": "decomposition"}


def check_calls(functions: Mapping[str, Any]) -> None:
    """Refuse functions that cannot be inlined into main.

    Raises:
        ValueError: one has no body, is recursive or missing, or inlining would give too many ops.
    """
    sizes: dict[str, int | None] = {}  # None: being visited
    stack = [("main", _calls(functions, "main"))]
    while stack:
        name, calls = stack[-1]
        inner = next((called for called in calls if sizes.get(called, -1) == -1), None)
        if inner is not None:
            sizes[name] = None
            stack.append((inner, _calls(functions, inner)))
            continue
        stack.pop()
        again = next((called for called in calls if called == name or sizes[called] is None), None)
        if again is not None:
            raise ValueError(f"the function {again} calls itself, at once or through another")
        sizes[name] = 1 + len(list(entry_block(functions[name]).operations)) + sum(sizes[each] or 0 for each in calls)
        if (sizes[name] or 0) > MOST_OPS:
            raise ValueError(f"the function {name} is more than {MOST_OPS:,} ops when all that it calls is inlined")


def _calls(functions: Mapping[str, Any], name: str) -> list[str]:
    """The functions that a function calls, once per call, inside loops and branches too."""
    function = functions.get(name)
    if function is None or len(function.regions[0].blocks) != 1:
        raise ValueError(f"the function {name} has no body" if function is not None else f"there is no function {name}")
    return [op.attributes[_CALLEE[op.name]].value for op in ops_inside(function) if op.name in _CALLEE]


def drop_uncalled(module: Any) -> None:
    """Erase the functions that main calls neither at once nor through another; loops and branches keep their calls."""
    functions = functions_of(module)
    called, stack = {"main"}, ["main"]
    while stack:
        for name in _calls(functions, stack.pop()):
            if name not in called:
                called.add(name)
                stack.append(name)
    for name, function in functions.items():
        if name not in called:
            function.erase()


def _copy_body(
    functions: Mapping[str, Any],
    call: Any,
    arguments: list[Any],
    caller: _C | None,
    context_of: Callable[[Any, _C | None], _C | None],
    note: Callable[[Any, _C | None], None],
    where: Any = None,
) -> list[Any]:
    """Clone the callee's body in front of `where` (default the call); return its results."""
    from jaxlib.mlir import ir

    where = where or ir.InsertionPoint(call)
    body = entry_block(functions[call.attributes["callee"].value])
    values: dict[Any, Any] = dict(zip(body.arguments, arguments, strict=True))
    for view in body.operations:
        op = view.operation
        operands = [values[value] for value in op.operands]
        if op.name == "func.return":
            return operands
        context = context_of(op, caller)
        if op.name == "func.call":
            results = _copy_body(functions, op, operands, context, context_of, note, where)
            values.update(zip(op.results, results, strict=True))
            continue
        clone = op.clone(where)
        for position, operand in enumerate(operands):
            clone.operands[position] = operand
        if op.regions:
            _rebind(clone, values)
        note(clone, context)
        values.update(zip(op.results, clone.results, strict=True))
    raise ValueError("a function of the module ends without a return")


def _rebind(op: Any, values: Mapping[Any, Any]) -> None:
    """Replace the callee's values by the caller's in the regions of a cloned op."""
    for inner in ops_inside(op):
        for position, operand in enumerate(inner.operands):
            if operand in values:
                inner.operands[position] = values[operand]
