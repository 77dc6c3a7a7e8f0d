"""Rules in kernels: a rule becomes a Triton function of the kernel's tuple of values.

    RULE = bind(plan.accept, ("target_prob", "draft_prob"), plan.constants)

and, inside a kernel that takes it as a `tl.constexpr`:

    h = evaluate(RULE, (target_prob, draft_prob), tl.float64)

The rule's own source is compiled, with what Triton would read differently from torch spelt out:

- Whatever a rule computes from numbers alone (options, constants of its module, literals) is computed here, in Python,
  and written into the source. So numbers keep float64 beside float64 scalars and act as float32 beside float32 rows, as
  in torch; Triton rounds a number to float32 as soon as a variable or a tuple holds it.
- A number that is compared or returned takes its precision explicitly, for Triton 3.6 rounds those too.
- `/` becomes `ops.divide`, which is IEEE in float32 as well, and `** 2` the product that it is in torch and NumPy.
  Triton has no power, and no `//` or `%` like theirs.
- `+` of two values becomes `ops.add`: two flags add up to a flag, in Triton modulo 2. Beside float64 scalars so do `+`,
  `-` and `*` of a value and a fraction: in Triton a flag times 0.1 is float32.
- Annotations and decorators go: Triton would look their names up.
"""

# ruff: noqa: N803 - a jit function; its constants are in capitals

import ast
import copy
import functools
import hashlib
import inspect
import linecache
import textwrap
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NoReturn

import numpy as np
import triton
import triton.language as tl

import acceptlib.ops as torch_ops
from acceptlib.engine.plan import Constant
from acceptlib.engine.triton import ops
from acceptlib.errors import StrategyDefinitionError, short_repr
from acceptlib.rules import ELEMENTS, Rule

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.BitAnd, ast.BitOr, ast.BitXor)
"""Operators that mean in Triton what they do in torch and NumPy."""

_ARITHMETIC = {ast.Add: "_add", ast.Sub: "_subtract", ast.Mult: "_multiply"}
"""What stands in for some of them where they would not."""

_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.If, ast.Return, ast.Expr, ast.Pass)
"""Statements that a rule may have. In a loop, say, a variable would not be the number that it is before."""

_REFUSED = (
    *(ast.Lambda, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Subscript, ast.Starred),
)
"""Expressions that Triton has not, that bring names of their own, or that hold numbers, which Triton would round."""


def bind(rule: Rule, names: tuple[str, ...], constants: Mapping[str, Constant]) -> Any:
    """Make a Triton function of a rule.

    Args:
        rule: The rule.
        names: What the kernel's tuple of values holds, in order. Per-position constants belong here. With `ELEMENTS`
            among them the values are float32 rows, else float64 scalars.
        constants: Numbers for the parameters that are not in `names`; others are ignored.

    Returns:
        A `triton.JITFunction` of the tuple, the same one for equal arguments.

    Raises:
        StrategyDefinitionError: The rule has no source, or reads what is neither in `names` nor a number.
    """
    numbers: dict[str, float] = {}
    for name in rule.names:
        if name in names:
            continue
        value = constants.get(name)
        if not isinstance(value, int | float):
            msg = f"{rule!r} reads {name!r}: expected one of {', '.join(names)} or a number, got {value!r}"
            raise StrategyDefinitionError(msg)
        numbers[name] = value
    function = compile_rule(rule.function, numbers, of_rows=not ELEMENTS.keys().isdisjoint(names))
    return _of_tuple(function, tuple(names.index(name) for name in rule.names if name not in numbers))


@functools.cache
def _of_tuple(function: Any, index: tuple[int, ...]) -> Any:
    """Return a Triton function that calls `function` with some values of a tuple."""
    name = "_".join((function.__name__, "of", *(str(i) for i in index)))
    source = f"def {name}(values):\n    return rule({', '.join(f'values[{i}]' for i in index)})\n"
    return define(name, source, {"__name__": function.__module__, "rule": function})


@triton.jit
def evaluate(RULE: tl.constexpr, values, DTYPE: tl.constexpr):
    """Evaluate a rule inside a kernel.

    Args:
        RULE: The function that `bind` returned.
        values: Tuple of tensors, float64 scalars for decisions and float32 for rows; those not read may be None.
        DTYPE: Of the result; `tl.int1` for `forgive`.
    """
    result = RULE(values)
    return result != 0 if tl.int1 == DTYPE else result.to(DTYPE)


def compile_rule(function: FunctionType, numbers: Mapping[str, float], *, of_rows: bool) -> Any:
    """Return a Triton function of what remains of one of rows or scalars once some of its parameters are numbers.

    It is the same one for the same numbers: 0.0 and -0.0 are not, nor are 1, 1.0 and True.
    """
    parts = tuple((name, repr(value), value) for name, value in numbers.items())
    return _compile_rule(function, parts, of_rows=of_rows)


@functools.cache
def _compile_rule(function: FunctionType, numbers: tuple[tuple[str, str, float], ...], *, of_rows: bool) -> Any:
    scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    writer = _Specialise(function.__qualname__, scope, {name: value for name, _, value in numbers}, of_rows=of_rows)
    definition = ast.fix_missing_locations(writer.visit_FunctionDef(_parse(function)))
    # Triton tells functions apart by module and name alone, and a kernel may hold two rules of one name.
    digest = hashlib.sha256(ast.unparse(definition).encode()).hexdigest()[:12]
    definition.name = f"{function.__qualname__.replace('.<locals>', '').replace('.', '_')}_{digest}"
    source = ast.unparse(definition) + "\n"
    names = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
    namespace = {"abs": ops.abs}  # the built-in one too
    namespace |= {name: _counterpart(scope[name]) for name in names & scope.keys()} | writer.functions
    namespace |= {"__name__": function.__module__, "_divide": ops.divide, "_like": ops.like}
    namespace |= {name: getattr(ops, name[1:]) for name in _ARITHMETIC.values()}
    return define(definition.name, source, namespace)


def define(name: str, source: str, namespace: dict[str, Any]) -> Any:
    """Return the Triton function `name` that `source` defines."""
    # Triton reads a function's source again, so it must be found under the function's file name.
    filename = f"<rule {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    # The interpreter wants `triton.language` among the globals.
    scope = {**namespace, "triton_language": tl}
    exec(compile(source, filename, "exec"), scope)  # noqa: S102 - the rule itself
    return triton.jit(scope[name])


def _parse(function: FunctionType) -> ast.FunctionDef:
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function.__code__))).body[0]
    except (OSError, SyntaxError, IndexError):
        definition = None
    if not isinstance(definition, ast.FunctionDef):
        msg = (
            f"rule {function.__qualname__!r}: expected a function written with `def` in a file, because Triton "
            f"compiles its source, and found none in {function.__code__.co_filename}. Move it into a module, or use "
            "backend='torch'."
        )
        raise StrategyDefinitionError(msg)
    return definition


def _counterpart(value: Any) -> Any:
    """Return what a name of a rule's module means in Triton."""
    if value is torch_ops:
        return ops
    if isinstance(value, ModuleType) and getattr(value, "ops", None) is torch_ops:
        package = ModuleType(value.__name__)
        package.ops = ops
        return package
    if isinstance(value, FunctionType) and value.__module__ == torch_ops.__name__:
        return getattr(ops, value.__name__)
    return value


class _Specialise(ast.NodeTransformer):
    """Write numbers into a rule, statement by statement, and spell out what Triton would read differently."""

    def __init__(self, name: str, scope: Mapping[str, Any], numbers: dict[str, float], *, of_rows: bool) -> None:
        self.name = name
        self.scope = scope
        self.of_rows = of_rows
        self.numbers = numbers  # parameters and variables that are numbers
        self.tensors: set[str] = set()  # those that are not
        self.functions: dict[str, Any] = {}  # functions of the rule's module that it calls

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store):
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            if not names & self.tensors:
                code = compile(ast.Expression(ast.fix_missing_locations(node)), "<rule>", "eval")
                value = eval(code, {**self.scope, **self.numbers})  # noqa: S307 - the rule itself
                if isinstance(value, np.generic):
                    value = value.item()
                for kind in (bool, int, float):
                    if isinstance(value, kind):  # what is written must be a plain one, and no member of an enum
                        return ast.Constant(kind(value))
        if isinstance(node, _REFUSED) or (isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS)):
            self._refuse(node)
        return super().visit(node)

    def _refuse(self, node: ast.AST) -> NoReturn:
        msg = (
            f"rule {self.name!r}: expected assignments, `if` and `return` of expressions, which is what the fused "
            f"kernels have, got {short_repr(ast.unparse(ast.fix_missing_locations(node)))}. Write it with these, with "
            "imports and helper functions at the top of the module, or use backend='torch'."
        )
        raise StrategyDefinitionError(msg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list, node.returns = [], None
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        read = [name for name in names if name not in self.numbers]
        # All are passed, and by place, however the function takes them.
        node.args = ast.arguments([], [ast.arg(name) for name in read], None, [], [], None, [])
        self.tensors = set(read)
        node.body = self._block(node.body)
        return node

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        """Keep the branch that an option chooses; there are no others, for a tensor has no one truth value."""
        written = ast.unparse(node.test)
        node.test = self.visit(node.test)
        if not isinstance(node.test, ast.Constant):
            msg = (
                f"rule {self.name!r}: expected `if` on options and other numbers alone, got 'if {written}'. Write a "
                "choice between values with ops.where, or use backend='torch'."
            )
            raise StrategyDefinitionError(msg)
        return self._block(node.body if node.test.value else node.orelse)

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        kept: list[ast.stmt] = []
        for statement in statements:
            result = self.visit(statement)
            kept += result if isinstance(result, list) else [result] if result else []
            if kept and isinstance(kept[-1], ast.Return):
                break
        return kept

    def visit_Expr(self, node: ast.Expr) -> None:
        """Drop docstrings."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        pairs = [pair for target in node.targets for pair in _unpacked(target, node.value)]
        names = {target.id for target, _ in pairs if isinstance(target, ast.Name)}
        if len(names) < len(pairs):  # what is no name, or a name twice
            self._refuse(node)
        pairs = [(target, self.visit(copy.deepcopy(value))) for target, value in pairs]
        numbers = {target.id: value.value for target, value in pairs if isinstance(value, ast.Constant)}
        pairs = [(target, value) for target, value in pairs if not isinstance(value, ast.Constant)]
        self.tensors = self.tensors - numbers.keys() | {target.id for target, _ in pairs}
        self.numbers |= numbers
        if len(pairs) <= 1:
            return ast.Assign([pairs[0][0]], pairs[0][1]) if pairs else None
        targets, values = (list(each) for each in zip(*pairs, strict=True))
        return ast.Assign([ast.Tuple(targets, ast.Store())], ast.Tuple(values, ast.Load()))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign | None:
        return self.visit_Assign(ast.Assign([node.target], node.value)) if node.value else None

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign | None:
        before = ast.parse(ast.unparse(node.target), mode="eval").body
        return self.visit_Assign(ast.Assign([node.target], ast.BinOp(before, node.op, node.value)))

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        written = ast.unparse(node)
        self.generic_visit(node)
        if isinstance(node.op, ast.Div):
            return _call("_divide", node.left, node.right)
        numbers = [part.value for part in (node.left, node.right) if isinstance(part, ast.Constant)]
        flags_may_add_up = isinstance(node.op, ast.Add) and not numbers
        flags_may_be_weighed = not self.of_rows and any(isinstance(number, float) for number in numbers)
        if type(node.op) in _ARITHMETIC and (flags_may_add_up or flags_may_be_weighed):
            return _call(_ARITHMETIC[type(node.op)], node.left, node.right)
        if isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value == 2:
            return ast.BinOp(node.left, ast.Mult(), node.left)
        if not isinstance(node.op, _OPERATORS):
            msg = (
                f"rule {self.name!r}: expected + - * /, ** 2, comparisons and & | ^ ~ of values, which is what the "
                f"fused kernels have, got {written!r}. Write it with these and acceptlib.ops (a power with sqrt, or "
                "with exp and log), or use backend='torch'."
            )
            raise StrategyDefinitionError(msg)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        """Leave out a plus, which Triton has not."""
        self.generic_visit(node)
        return node.operand if isinstance(node.op, ast.UAdd) else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        left, right = node.left, node.comparators[0]
        node.left = _call("_like", left, right) if isinstance(left, ast.Constant) else left
        node.comparators[0] = _call("_like", right, left) if isinstance(right, ast.Constant) else right
        return node

    def visit_Return(self, node: ast.Return) -> ast.Return:
        self.generic_visit(node)
        if isinstance(node.value, ast.Constant):
            node.value = _call("_like", node.value, node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Compile a function of the rule's own module, with the numbers that it is given here."""
        written = ast.unparse(node)
        self.generic_visit(node)
        self._expect_op(node.func, written)
        function = self.scope.get(node.func.id) if isinstance(node.func, ast.Name) else None
        function = function.function if isinstance(function, Rule) else function
        if not isinstance(function, FunctionType) or function.__module__ == torch_ops.__name__:
            return node
        bound = inspect.signature(function).bind(*node.args, **{word.arg: word.value for word in node.keywords})
        bound.apply_defaults()
        given = {name: part.value if isinstance(part, ast.Constant) else part for name, part in bound.arguments.items()}
        numbers = {name: value for name, value in given.items() if isinstance(value, int | float)}
        compiled = compile_rule(function, numbers, of_rows=self.of_rows)
        self.functions[compiled.__name__] = compiled
        return _call(compiled.__name__, *(value for value in given.values() if isinstance(value, ast.expr)))

    def _expect_op(self, function: ast.expr, written: str) -> None:
        """Refuse a value's method and another module's function, but for `acceptlib.ops`: kernels have neither."""
        root = function
        while isinstance(root, ast.Attribute):
            root = root.value
        refused = root is not function and (not isinstance(root, ast.Name) or root.id in self.tensors)
        if isinstance(root, ast.Name) and not refused and root.id in self.scope:
            found = self.scope[root.id]
            if isinstance(found, BuiltinFunctionType) or (root is not function and isinstance(found, ModuleType)):
                code = compile(ast.Expression(ast.fix_missing_locations(function)), "<rule>", "eval")
                called = eval(code, dict(self.scope))  # noqa: S307 - the rule itself
                refused = getattr(called, "__module__", None) != torch_ops.__name__
        if refused:
            msg = (
                f"rule {self.name!r}: expected calls of acceptlib.ops, which is what the fused kernels have, got "
                f"{written!r}. Write it with these, or use backend='torch'."
            )
            raise StrategyDefinitionError(msg)


def _unpacked(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each name of an assignment with what it is assigned."""
    both = ast.Tuple | ast.List
    if isinstance(target, both) and isinstance(value, both) and len(target.elts) == len(value.elts):
        for one, part in zip(target.elts, value.elts, strict=True):
            yield from _unpacked(one, part)
    else:
        yield target, value


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])
