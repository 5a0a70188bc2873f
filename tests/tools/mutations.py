"""Make mutants of a Python source, for the command `mutants`.

A mutant is a copy with one change, such as in an operator, a constant, a name or the order of
statements. Some parts never change, such as messages and imports.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

OPERATORS = {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "**": "*",
    "//": "*",
    "%": "*",
    "@": "*",
    "&": "|",
}
COMPARISONS = {
    "<": ["<=", ">="],
    "<=": ["<", ">"],
    ">": [">=", "<="],
    ">=": [">", "<"],
    "==": ["!="],
    "!=": ["=="],
    "is": ["is not"],
    "is not": ["is"],
    "in": ["not in"],
    "not in": ["in"],
}
_PAIRS = """sub_ add_, mul_ div_, sub add, mul div, addcmul_ addcdiv_, _foreach_add_ _foreach_sub_,
    _foreach_mul_ _foreach_div_, min max, amin amax, argmin argmax, minimum maximum,
    clamp_min clamp_max, mean sum, floor ceil, any all, zeros ones, zeros_like ones_like,
    new_zeros new_ones, cumsum cumprod, exp log, square sqrt"""
NAMES = {a: b for pair in _PAIRS.split(",") for a, b in (pair.split(), pair.split()[::-1])}
_SYMMETRIC = (
    "min max minimum maximum add mul dot gcd lcm equal isclose allclose logical_and "
    "logical_or hypot"
)
_TYPED = "isinstance issubclass getattr setattr hasattr cast zip super field"  # a swap crashes
UNSWAPPED = set(f"{_SYMMETRIC} {_TYPED}".split())


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one file: `new` replaces the bytes from `start` to `end`.

    lines: the first and last line of the changed statement.
    scopes: the first and last line of each enclosing function or class, innermost first.
    label: a text about the change. It is unique in the file, and stays the same if lines move.
    """

    file: str
    kind: str
    start: int
    end: int
    new: bytes
    lines: tuple[int, int]  # of the statement, whose tests are asked
    scopes: tuple[tuple[int, int], ...]  # of functions and classes around it, innermost first
    label: str = ""  # "Class.function: old -> new", unique in the file; it outlives moved lines

    def texts(self, source: bytes) -> tuple[str, str]:
        """Return two texts: the lines to change in `source`, and the same lines in the mutant."""
        first = source.rfind(b"\n", 0, self.start) + 1
        last = source.find(b"\n", self.end)
        before, after = (
            source[first:last],
            source[first : self.start] + self.new + source[self.end : last],
        )
        return before.decode().strip(), after.decode().strip()


class Places:
    """A walk over a source text, which collects its mutants in `found`."""

    def __init__(self, file: str, source: bytes):
        self.file, self.source, self.found = file, source, list[Mutant]()
        self.starts = [0, *(match.end() for match in re.finditer(b"\n", source))]
        self.lines, self.scopes, tree = (1, 1), tuple[tuple[int, int], ...](), ast.parse(source)
        self.first = first_bound(tree)
        self.path: tuple[str, ...] = ()  # names of the functions and classes around a statement
        self.in_function = False
        self.counts: collections.Counter[str] = collections.Counter()
        self.block(tree.body)

    def at(self, node: Any) -> tuple[int, int]:
        """Return the first byte of a node in the source, and the byte after its last one."""
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[
            node.end_lineno - 1
        ] + node.end_col_offset

    def text(self, node: ast.AST) -> bytes:
        """Return the source text of a node."""
        start, end = self.at(node)
        return self.source[start:end]

    def add(self, kind: str, start: int, end: int, new: bytes | str) -> None:
        """Add the mutant that has `new` in place of the bytes from start to end."""
        new = new.encode() if isinstance(new, str) else new
        before, after = self.source[start:end].decode(), new.decode()
        label = f"{'.'.join(self.path)}: {squeeze(before)} -> {squeeze(after)}"
        self.counts[label] += 1
        if self.counts[label] > 1:
            label += f" ({self.counts[label]})"
        mutant = Mutant(self.file, kind, start, end, new, self.lines, self.scopes, label)
        self.found.append(mutant)

    def between(
        self, kind: str, left: ast.AST, right: ast.AST, pattern: str, others: dict[str, list[str]]
    ) -> None:
        """Add mutants that replace the operator between two nodes.

        kind: the kind of these mutants.
        pattern: a regular expression that matches the operator.
        others: for each operator, the operators that replace it.
        """
        start, end = self.at(left)[1], self.at(right)[0]
        gap = self.source[start:end]
        if (match := re.search(pattern.encode(), gap)) and b"#" not in gap:
            for other in others.get(" ".join(match[0].decode().split()), []):
                self.add(kind, start + match.start(), start + match.end(), other)

    def swap(self, kind: str, one: ast.AST, two: ast.AST) -> None:
        """Add a mutant in which two nodes change places; `two` comes after `one` in the source."""
        (a, b), (c, d) = self.at(one), self.at(two)
        self.add(kind, a, d, self.source[c:d] + self.source[b:c] + self.source[a:b])

    def block(self, body: Sequence[ast.stmt]) -> None:
        """Add the mutants of some consecutive statements, and those that swap two neighbours."""
        for statement in body:
            self.statement(statement)
        for one, two in pairwise(body):
            (read1, write1), (read2, write2) = touched(one), touched(two)
            made = {
                name
                for name in write1
                if one.lineno <= self.first.get(name, 0) <= (one.end_lineno or 0)
            }
            # Their order can matter, and the second can do without a name that the first makes.
            if (write1 & (read2 | write2) or write2 & read1) and not made & read2:
                self.lines = (one.lineno, two.end_lineno or two.lineno)
                self.swap("order", one, two)

    def statement(self, node: ast.stmt) -> None:
        """Add the mutants of a statement and of all that is in it."""
        outer_path, outer_place = self.path, self.in_function
        if not self.in_function and (name := bound_name(node)):
            self.path = (*self.path, name)
        self.in_function = self.in_function or isinstance(node, ast.FunctionDef)
        self._statement(node)
        self.path, self.in_function = outer_path, outer_place

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Raise() | ast.Assert() | ast.Import() | ast.ImportFrom():
                return
            case ast.FunctionDef(name=name) if name in ("__repr__", "__str__"):
                return
            case ast.FunctionDef() | ast.ClassDef():
                outer, self.scopes = (
                    (self.scopes, self.first),
                    ((node.lineno, node.end_lineno or 0), *self.scopes),
                )
                self.lines = (node.lineno, node.body[0].lineno - 1)
                if isinstance(node, ast.FunctionDef):
                    self.first = first_bound(node)
                    for default in (*node.args.defaults, *node.args.kw_defaults):
                        if default is not None:
                            self.expression(default)
                self.block(node.body)
                self.scopes, self.first = outer
                return
            case ast.Assign(targets=[ast.Name(id="name" | "paper" | "__slots__" | "__all__")]):
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
        body = getattr(node, "body", None)
        header = body[0].lineno - 1 if body else node.end_lineno
        self.lines = lines = (node.lineno, max(node.lineno, header or 0))
        if self.is_droppable(node):
            self.add("dropped", *self.at(node), "pass")
        if isinstance(node, ast.AugAssign):
            swap = {f"{a}=": [f"{b}="] for a, b in OPERATORS.items()}
            self.between("operator", node.target, node.value, r"[-+*/%@&]{1,2}=", swap)
        for name, value in ast.iter_fields(node):
            if name == "annotation" or (
                isinstance(node, ast.Expr) and isinstance(value, ast.Constant)
            ):
                continue
            for child in value if isinstance(value, list) else [value]:
                self.lines = lines
                if isinstance(child, ast.expr):
                    self.expression(child, condition=name == "test")
                elif isinstance(child, ast.withitem):
                    self.expression(child.context_expr)
                elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                    self.block(child.body)
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self.block(value)

    def is_droppable(self, node: ast.stmt) -> bool:
        """Return whether all names are still defined if a mutant leaves out the statement."""
        match node:
            case (
                ast.Expr(value=ast.Call())
                | ast.AugAssign()
                | ast.AnnAssign(target=ast.Attribute(), value=ast.expr())
            ):
                return True
            case ast.Assign(targets=[target]):
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                return all(
                    not isinstance(p, ast.Name) or 0 < self.first.get(p.id, 0) < node.lineno
                    for p in parts
                )
        return False

    def expression(self, node: ast.expr, condition: bool = False) -> None:
        """Add the mutants of an expression and of its parts.

        condition: True if a branch depends on the expression; then its negation is a mutant, too.
        """
        start, end = self.at(node)
        match node:
            case ast.JoinedStr():
                return
            case ast.Subscript(value=ast.Name(id=name)) if name[0].isupper():
                return  # a type
            case ast.Constant(value=bool() as value):
                self.add("constant", start, end, str(not value))
            case ast.Constant(value=int() as value):
                self.add("constant", start, end, str(value + 1))
            case ast.Constant(value=float() as value):
                near = (
                    1.0 if value == 0 else value * (1000 if value < 1e-5 else 1.1)
                )  # a guard's tenth shows nowhere
                self.add("constant", start, end, repr(float(f"{near:.6g}")))
            case ast.BinOp(left=left, right=right):
                kind = "sign" if isinstance(node.op, (ast.Add, ast.Sub)) else "operator"
                if not any(is_text_or_list(side) for side in (left, right)):
                    self.between(
                        kind,
                        left,
                        right,
                        r"\*\*|//|[-+*/%@&]",
                        {a: [b] for a, b in OPERATORS.items()},
                    )
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                self.add(
                    "sign", start, self.at(operand)[0], self.source[start + 1 : self.at(operand)[0]]
                )
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.add("boolean", start, start + 4, "")
            case ast.BoolOp(values=values):
                word = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                pieces, gaps = [self.text(v) for v in values], pairwise(values)
                joins = [self.source[self.at(a)[1] : self.at(b)[0]].decode() for a, b in gaps]
                new = pieces[0] + b"".join(
                    re.sub(rf"\b{word[0]}\b", word[1], join).encode() + piece
                    for join, piece in zip(joins, pieces[1:], strict=True)
                )
                self.add("boolean", self.at(values[0])[0], self.at(values[-1])[1], new)
            case ast.Compare(left=left, comparators=comparators):
                pattern = r"[<>=!]=|[<>]|\bis\s+not\b|\bis\b|\bnot\s+in\b|\bin\b"
                for one, two in zip([left, *comparators], comparators, strict=False):
                    self.between("comparison", one, two, pattern, COMPARISONS)
            case ast.Call(func=func):
                self.call(node, func)
        inverted = isinstance(node, (ast.Compare, ast.BoolOp, ast.Constant, ast.UnaryOp))
        if condition and not inverted:
            self.add("boolean", start, end, b"not (" + self.text(node) + b")")
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.comprehension):
                    for part in (child.iter, *child.ifs):
                        self.expression(part, condition=part is not child.iter)
                elif isinstance(child, ast.keyword) and not self.is_harmless(child):
                    self.expression(child.value)
                elif isinstance(child, ast.arguments):
                    for default in (*child.defaults, *filter(None, child.kw_defaults)):
                        self.expression(default)
                elif isinstance(child, ast.expr):
                    self.expression(child, condition=name == "test")

    @staticmethod
    def is_harmless(word: ast.keyword) -> bool:
        """Return True if tests cannot notice a change of this keyword argument.

        For example, dim=-1 and dim=1 are the same for a matrix.
        """
        return word.arg in ("strict", "stacklevel", "non_blocking") or (
            word.arg in ("dim", "axis") and isinstance(word.value, ast.UnaryOp)
        )

    def call(self, node: ast.Call, func: ast.expr) -> None:
        """Add mutants with another function of the same kind, and with two arguments swapped."""
        name = (
            func.attr
            if isinstance(func, ast.Attribute)
            else func.id
            if isinstance(func, ast.Name)
            else ""
        )
        end = self.at(func)[1]
        if name in NAMES and (
            isinstance(func, ast.Attribute) or name in ("min", "max", "any", "all")
        ):
            self.add("name", end - len(name), end, NAMES[name])
        if name in UNSWAPPED:
            return
        plain = [
            pair
            for pair in pairwise(node.args)
            if not any(isinstance(one, ast.Starred) for one in pair)
        ]
        for one, two in plain[len(plain) // 2 :][
            :1
        ]:  # of one call one pair, as most swaps only crash
            if self.text(one) != self.text(two):
                self.swap("arguments", one, two)


def squeeze(text: str) -> str:
    """Return a text as one line, with single spaces."""
    return " ".join(text.split())


def bound_name(node: ast.stmt) -> str:
    """Return the name that a definition or an assignment binds; "" for another statement."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return ""


def is_text_or_list(side: ast.expr) -> bool:
    """Return whether an operand is a text, a list or a tuple.

    Operations with such an operand are not mutated. With most new operators, such as - in place of
    +, they would only raise an error.
    """
    text = isinstance(side, ast.Constant) and isinstance(side.value, str)
    return text or isinstance(side, (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple))


def first_bound(scope: ast.AST) -> dict[str, int]:
    """Return for each name the first line in which a function or module binds the name."""
    found: dict[str, int] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.arg) or (
            isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ):
            name = node.arg if isinstance(node, ast.arg) else node.id
            found[name] = min(node.lineno, found.get(name, node.lineno))
    return found


def touched(node: ast.stmt) -> tuple[set[str], set[str]]:
    """Return the names that a simple statement reads, and those that it writes.

    Names may be dotted. For other statements both sets are empty.
    """
    if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)):
        return set(), set()
    read, write = set[str](), set[str]()
    for part in ast.walk(node):
        if isinstance(part, (ast.Name, ast.Attribute)):
            (read if isinstance(part.ctx, ast.Load) else write).add(ast.unparse(part))
        elif isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store):
            write.add(ast.unparse(part.value))
    if isinstance(node, ast.AugAssign):
        read |= write
    elif (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
    ):
        write.add(ast.unparse(node.value.func.value))  # x.add_(y)
    return read - {"self"}, write - {"self"}


def changes(mutant: Mutant, source: bytes) -> bool:
    """Return True if the mutated source is valid Python and its syntax tree is not the old one."""
    try:
        new = ast.parse(source[: mutant.start] + mutant.new + source[mutant.end :])
    except SyntaxError:
        return False
    return ast.dump(new) != ast.dump(ast.parse(source))


def inner_lines(source: bytes) -> set[int]:
    """Return the numbers of the lines inside functions.

    All other lines run only once, when a module is imported, and not in each test.
    """
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {line for f in functions for line in range(f.body[0].lineno, (f.end_lineno or 0) + 1)}
