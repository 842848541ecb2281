"""The sandbox that renders chat templates; imported only if jinja2 is installed."""

import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from megatron_data.tokenizers.template_filters import limited_filters, limited_tests, to_json
from megatron_data.tokenizers.template_limits import (
    CALL,
    Budget,
    check_binary,
    check_format,
    check_method,
)

LONGEST_SOURCE = 1 << 18
"""Largest number of characters of a template."""

_PARTS = ("text", "image", "image_url", "video", "audio")
_BUILT_IN: tuple[type, ...] = (
    *(str, bytes, int, float, list, tuple, dict, set, frozenset, range),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
_METHODS = (types.BuiltinMethodType, types.MethodType)  # those of escaped texts are Python's

# Names of internal filters; with a leading space, no template can spell them.
_ITERATED, _COMPARED, _SOUGHT, _JOINED = " iterated", " compared", " sought", " joined"
_CAPTURING = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Block)
_STRFTIME = 256  # largest number of characters of one format character
_DEEPEST = 100  # largest depth of nested nodes; Python compiles about 200 nested brackets
_NODES, _CHARACTERS = 32, 64  # nodes and characters of a body that cost one step


class SandboxedTemplate:
    """A template with the functions and filters of Hugging Face transformers.

    Attributes:
        writes_directly: Whether every `{% generation %}` block writes to the result, and none to a
            variable or an argument.

    Args:
        source: The template.
        budget: Limits on its compilation.

    Raises:
        TemplateError: The source is not a template.
    """

    def __init__(self, source: str, budget: Budget) -> None:
        if len(source) > LONGEST_SOURCE:
            raise TemplateError(f"it has more than {LONGEST_SOURCE:,} characters")
        self._environment = _Environment()
        with self._environment.spending(budget):
            tree = self._environment.parse(source)
            self.writes_directly = _writes_directly(tree)
            counting = _Counting().visit(tree)
            _check_depth(counting)
            counting.set_environment(self._environment)
            code = self._environment.compile(counting)
        self._template = self._environment.template_class.from_code(
            self._environment, code, self._environment.make_globals(None)
        )

    def render(self, budget: Budget, variables: Mapping[str, Any], **more: Any) -> str:
        """Renders the template with the given variables.

        Raises:
            TemplateError: The template refuses the variables or exceeds the budget.
        """
        with self._environment.spending(budget):
            return self._template.render(variables, **more)


class _Generation(Extension):
    """The block `{% generation %}` … `{% endgeneration %}`, as in Hugging Face transformers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        environment: Any = self.environment
        return str(environment.left().blocks.write(caller()))


class _Environment(ImmutableSandboxedEnvironment):
    """Charges work and memory of a template to the budget of the rendering thread."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        self._active = threading.local()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=self._written,
        )
        self.filters["tojson"] = lambda *given, **options: to_json(self.left(), *given, **options)
        filters: dict[str, Any] = dict(self.filters)
        tests: dict[str, Any] = dict(self.tests)
        self.filters: Any = limited_filters(filters, self.left)
        self.tests: Any = limited_tests(tests, self.left)
        self.filters[_ITERATED] = pass_context(partial(self._iterated))
        self.filters[_COMPARED] = pass_context(partial(self._compared))
        self.filters[_SOUGHT] = pass_context(partial(self._compared, sought=True))
        self.filters[_JOINED] = pass_context(partial(self._joined))
        del self.globals["lipsum"]  # random text
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = self._strftime_now

    @contextmanager
    def spending(self, budget: Budget) -> Iterator[None]:
        """Charges the work of this thread to a budget inside the block."""
        before = getattr(self._active, "budget", None)
        self._active.budget = budget
        try:
            yield
        finally:
            self._active.budget = before

    def left(self) -> Budget:
        """Returns the remaining budget of the template that this thread renders."""
        budget: Budget = self._active.budget
        return budget

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Applies an operator to two values."""
        check_binary(self.left(), operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Calls a function for a template; parameters have Jinja's names, to avoid conflicts."""
        budget = __self.left()
        budget.spend(CALL)
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, _METHODS) and _is_built_in(owner):
            if __obj.__name__ == "join" and args:
                args = (budget.collect(args[0]), *args[1:])
            check_method(budget, owner, __obj.__name__, (*args, *kwargs.values()))
        made = super().call(__context, __obj, *args, **kwargs)
        if isinstance(made, str | list | tuple):
            budget.spend(len(made) // _CHARACTERS)
        return made

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns the sandbox's `str.format` with bounded widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*arguments: Any, **options: Any) -> str:
            check_format(self.left(), str(value.__self__), (*arguments, *options.values()))
            return wrapped(*arguments, **options)

        return bounded

    def concat(self, parts: Iterable[str]) -> str:
        """Joins the texts that a template, a macro or a block writes."""
        budget, kept, size = self.left(), [], 0
        for part in parts:
            size += len(part)
            if size > budget.characters:
                budget.allocate(size)
            kept.append(part)
        budget.allocate(size)
        return "".join(kept)

    def _strftime_now(self, format: str) -> str:  # noqa: A002 - the name that templates use
        budget = self.left()
        budget.allocate(_STRFTIME * len(format))
        return budget.now.strftime(format)

    def _written(self, value: Any) -> Any:
        """Returns a value to write; refuses null and lists of parts, which Python would spell."""
        if value is None:
            raise TemplateError(
                "it writes null as text, such as the content of a message without content"
            )
        if isinstance(value, list) and any(map(_is_part, value)):
            raise TemplateError(
                "it writes a content of several parts as a Python list; give contents that are "
                "strings, or a template that reads parts"
            )
        self.left().measure(value)
        return value

    def _iterated(self, context: Context, value: Any, weight: int) -> Any:
        self.left().spend_elements(value, weight)
        return value if hasattr(value, "__len__") else self._each(value, weight)

    def _each(self, values: Any, weight: int) -> Iterator[Any]:
        budget = self.left()
        for value in values:
            budget.spend(weight)
            yield value

    def _compared(self, context: Context, value: Any, sought: bool = False) -> Any:
        if isinstance(value, str):
            self.left().spend(1 + len(value) // _CHARACTERS)
        elif not (value is None or isinstance(value, int | float) or (sought and _is_map(value))):
            self.left().measure(value)
        return value

    def _joined(self, context: Context, parts: list[Any]) -> str:
        budget = self.left()
        budget.allocate(sum(map(budget.measure, parts)))
        return "".join(map(str, parts))


class _Counting(NodeTransformer):
    """Adds charges to loops, macros, comparisons, slices and the operator `~` of a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        weight = _weight(node)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _ITERATED, weight)
        if node.recursive:
            node.body.insert(0, _charge(weight, node.lineno))
        return node

    def _charged(self, node: Any) -> nodes.Node:
        weight = _weight(node)
        self.generic_visit(node)
        node.body.insert(0, _charge(weight, node.lineno))
        return node  # type: ignore[no-any-return]

    visit_Macro = visit_CallBlock = visit_Block = _charged  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, _ITERATED, 1)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _COMPARED)
        for operand in node.ops:
            name = _SOUGHT if operand.op in ("in", "notin") else _COMPARED
            operand.expr = _filtered(operand.expr, name)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return _filtered(parts, _JOINED)


def _filtered(node: Any, name: str, *arguments: int) -> nodes.Expr:
    if isinstance(node, nodes.Const) and name in (_COMPARED, _SOUGHT):
        return node
    given = [nodes.Const(argument, lineno=node.lineno) for argument in arguments]
    return nodes.Filter(node, name, given, [], None, None, lineno=node.lineno)


def _charge(weight: int, line: int) -> nodes.Node:
    none = nodes.Tuple([], "load", lineno=line)
    return nodes.ExprStmt(_filtered(none, _ITERATED, weight), lineno=line)


def _weight(body: nodes.Node) -> int:
    """Returns the steps of running a body once, besides those that its nodes charge."""
    size = characters = 0
    for node in body.find_all(nodes.Node):
        size += 1
        if isinstance(node, nodes.TemplateData):
            characters += len(node.data)
    return 1 + size // _NODES + characters // _CHARACTERS


def _writes_directly(node: nodes.Node, captured: bool = False) -> bool:
    """Returns whether the template cannot read the text of its generation blocks."""
    if isinstance(node, nodes.CallBlock) and isinstance(node.call.node, nodes.ExtensionAttribute):
        if captured:
            return False
    elif isinstance(node, _CAPTURING) or (isinstance(node, nodes.For) and node.recursive):
        captured = True
    return all(_writes_directly(child, captured) for child in node.iter_child_nodes())


def _check_depth(tree: nodes.Node) -> None:
    """Refuses templates nested deeper than the stack of Python's parser.

    The parser would raise MemoryError, which also means a real lack of memory.
    """
    level, depth = [tree], 0
    while level:
        depth += 1
        if depth > _DEEPEST:
            raise TemplateError(f"it is nested more than {_DEEPEST} levels deep")
        level = [child for node in level for child in node.iter_child_nodes()]


def _is_part(value: Any) -> bool:
    """Returns whether a value is a part of a content, such as `{"type": "text", "text": "…"}`."""
    return isinstance(value, dict) and value.get("type") in _PARTS


def _is_built_in(owner: Any) -> bool:
    """Returns whether a method's owner is a value of a built-in type, the type itself, or None.

    Static methods of built-in types have no owner.
    """
    kind = owner if isinstance(owner, type) else type(owner)
    return owner is None or issubclass(kind, _BUILT_IN)


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)
