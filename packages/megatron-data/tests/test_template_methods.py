"""The limits of every method that a chat template may call."""

import pytest
from megatron_data import DataError
from megatron_data.tokenizers import ChatTemplate, TemplateLimits

sandbox = pytest.importorskip("jinja2.sandbox", reason="chat templates are an extra")

REFUSED = ("expandtabs", "translate", "maketrans")
WIDE = dict.fromkeys(("center", "ljust", "rjust", "zfill"), "4097")
CASES = ("capitalize", "casefold", "lower", "swapcase", "title", "upper")
SHORT = {  # calls that make no longer text
    **dict.fromkeys(("count", "find", "index", "rfind", "rindex"), "t[:1]"),
    **dict.fromkeys(("startswith", "endswith", "partition", "rpartition"), "t[:1]"),
    **dict.fromkeys(("split", "rsplit", "removeprefix", "removesuffix"), "t[:1]"),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), "t[:1]"),
    "fromhex": "'00'",
    "splitlines": "",
}
LONG_TEXTS = {  # arguments of calls that make more than 4096 characters of 1100
    **dict.fromkeys((*CASES, "encode"), ""),
    **WIDE,
    "replace": "t[:1], t[:5]",
    "join": "[t, t, t, t, t]",
    "format": "t=t",
    "format_map": "{'t': t}",
}
LONG_BYTES = {**WIDE, "replace": LONG_TEXTS["replace"], "join": LONG_TEXTS["join"]}
STARTS = {
    "text": ("{% set t = messages[0].content %}", 1100, LONG_TEXTS),
    "escaped text": ("{% set t = messages[0].content | e %}", 1100, LONG_TEXTS),
    "bytes": ("{% set t = messages[0].content.encode() %}", 1000, LONG_BYTES),
}


def methods_of(value: object) -> list[str]:
    """Returns the names of the methods that jinja2's sandbox lets a template call."""
    environment = sandbox.ImmutableSandboxedEnvironment()
    found = [name for name in dir(value) if callable(getattr(value, name))]
    return [name for name in found if environment.is_safe_attribute(value, name, value)]


def render(source: str, size: int, limits: TemplateLimits) -> None:
    user = [{"role": "user", "content": "x" * size}]
    tools = [{"list": list(range(size)), "dict": {str(i): i for i in range(size)}}]
    tools[0]["nested"] = [tools[0]["list"]]
    ChatTemplate(source, limits=limits).render(user, tools)


@pytest.mark.parametrize("kind", STARTS)
def test_every_method_of_texts_is_bounded_before_it_is_called(kind: str) -> None:
    """Results are not written and steps are plenty, so the size of a text is the only limit."""
    start, size, long = STARTS[kind]
    limits = TemplateLimits(steps=10**6, characters=4096)
    for name in methods_of(b"" if kind == "bytes" else ""):
        given = long.get(name, SHORT.get(name, ""))
        call = f"t.{name}({given})"
        if name.startswith("format"):
            call = f"('{{t}}' * 5).{name}({given})"
        source = f"{start}{{% set result = {call} %}}"
        if name in long or name in REFUSED:
            with pytest.raises(DataError, match=r"more than 4,096 characters|not supported"):
                render(source, size, limits)
        else:
            assert name in SHORT or name.startswith("is") or name in (*CASES, "hex", "decode")
            render(source, size, limits)


@pytest.mark.parametrize(
    "call",
    [
        *("encode('utf-32')", "encode(encoding='punycode')", "encode(errors='namereplace')"),
        "encode().decode('utf-7')",
    ],
)
def test_codecs_that_lengthen_a_text_are_refused(call: str) -> None:
    with pytest.raises(DataError, match=r"code\('.*'\) is not supported"):
        render(f"{{% set t = messages[0].content.{call} %}}", 9, TemplateLimits())
    render(
        "{% set t = messages[0].content.encode('ascii', 'ignore').decode() %}", 9, TemplateLimits()
    )


@pytest.mark.parametrize(
    "call",
    [
        *("list.copy()", "list.count(1)", "list.index(1)", "dict.copy()", "dict.keys()"),
        *("dict.values()", "dict.items()", "dict.keys().isdisjoint([0])"),
        *("dict.items().isdisjoint([0])", "nested.count(tools[0].list)"),
        "nested.index(tools[0].list)",
    ],
)
def test_methods_of_containers_cost_steps_by_their_elements(call: str) -> None:
    source = f"{{% set result = tools[0].{call} %}}"
    render(source, 2, TemplateLimits(steps=300))
    with pytest.raises(DataError, match="exceeds the limit of steps"):
        render(source, 1000, TemplateLimits(steps=300))


def test_arguments_of_isdisjoint_cost_steps() -> None:
    source = "{% set d = {'a': 1}.keys() %}{% set result = d.isdisjoint(tools[0].list) %}"
    render(source, 2, TemplateLimits(steps=300))
    with pytest.raises(DataError, match="exceeds the limit of steps"):
        render(source, 1000, TemplateLimits(steps=300))


@pytest.mark.parametrize("call", ["{}.fromkeys([1])", "(1).from_bytes('1'.encode())"])
def test_methods_of_types_are_refused(call: str) -> None:
    with pytest.raises(DataError, match=r"the method from\w+ is not supported"):
        render(f"{{% set result = {call} %}}", 9, TemplateLimits())
