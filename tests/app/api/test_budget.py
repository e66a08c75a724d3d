"""Bounds on a single request: what ordinary clients send passes, and what costs too much is refused by name."""

from typing import Any

import orjson
import pytest

from app.api import budget, conversation, grammar_cost, structure
from app.api.conversation import messages_for_template
from app.api.errors import ApiError
from app.api.extensions import Defaults
from app.api.plan import plan_chat, plan_completion
from app.api.schema import ChatRequest
from app.api.structure import check_structure

DEFAULTS = Defaults(16, 600.0)


def chat(**more: Any) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": "x"}]} | more)


def completion(**more: Any) -> bytes:
    return orjson.dumps({"prompt": "x"} | more)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tool(name: str, properties: int) -> dict[str, Any]:
    one = {"type": "string", "description": "d" * 200, "enum": ["a", "b"]}
    parameters = {"type": "object", "properties": {f"p{i}": one for i in range(properties)}}
    return {
        "type": "function",
        "function": {"name": name, "description": "d" * 1000, "parameters": parameters},
    }


def as_tag(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def grammar(text: str) -> bytes:
    return chat(response_format=as_tag({"type": "grammar", "grammar": text}))


def chained(links: int) -> dict[str, Any]:
    """A schema of arrays in arrays, each of which refers to the next one."""
    arrays = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(links)}
    return {"$ref": "#/$defs/a0", "$defs": arrays | {f"a{links}": {"type": "string"}}}


def counting(properties: int) -> dict[str, Any]:
    """A schema of an object that counts its properties."""
    known = {f"p{i}": {"type": "string"} for i in range(properties)}
    return {"type": "object", "properties": known, "minProperties": 1}


def as_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


# ------------------------------------------------------------------------------------------------ what people send


def test_ordinary_requests_pass() -> None:
    for body in (
        chat(n=128, logprobs=True, top_logprobs=20),
        chat(tools=[tool(f"t{i}", 40) for i in range(50)]),
        chat(response_format=as_format(nested(20))),
        chat(
            response_format=as_format(
                {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
            )
        ),
        chat(
            stop=["\n\n", "END"],
            stop_token_ids=list(range(100)),
            logit_bias={str(i): -100 for i in range(1024)},
            min_tokens=5,
        ),
        chat(stop_token_ids=list(range(1000))),
        chat(response_format=as_format(counting(190))),
        chat(
            response_format=as_format(
                {"pattern": r"^\d{4}-\d{2}-\d{2} ([a-z{9}-]{1,63}\.){1,30}[a-z]{2,999999}$"}
            )
        ),
        chat(response_format=as_format({"properties": {"pattern": {"type": "string", "maxLength": 10**9}}})),
        chat(response_format=as_tag({"type": "grammar", "grammar": 'root ::= "a"{1,100000}'})),
        # an address and a version, a text of up to 1,400 characters, and thirty of up to 255
        chat(
            response_format=as_format(
                {"pattern": r"^(https?://)?([\w-]+\.)*[\w-]+(:\d+)?(/[^?#]*)?(\?[^#]*)?(#.*)?$"}
            )
        ),
        chat(response_format=as_format({"pattern": r"^[\s\S]{1,1400}$"})),
        chat(
            response_format=as_format({"properties": {f"p{i}": {"pattern": "^.{1,255}$"} for i in range(30)}})
        ),
        chat(response_format=as_format({"properties": {f"p{i}": {"maxLength": 5000} for i in range(300)}})),
        chat(response_format=as_format({"properties": {f"p{i}": {"maxLength": i} for i in range(40)}})),
        chat(
            response_format=as_format(
                {
                    "properties": {
                        f"p{i}": {"type": "integer", "minimum": 1, "maximum": 100} for i in range(1200)
                    }
                }
            )
        ),
        chat(response_format=as_format({"properties": {"minimum": {"type": "number"}, "maximum": True}})),
        chat(response_format=as_format({"pattern": "(" * 256 + "a" + ")" * 256})),
        chat(response_format=as_format(chained(1000))),
        chat(response_format=as_format({"anyOf": [{"$ref": "#/$defs/a"}] * 5000, "$defs": {"a": {}}})),
        chat(n=128, response_format=as_format(tool("t", 50)["function"]["parameters"])),
        orjson.dumps({"messages": [{"role": "user", "content": "a long message"}] * 10_000}),
    ):
        check_structure(body)
        plan_chat(body, {}, DEFAULTS)
    for body in (
        completion(prompt='a, {b}: ["c"]\\ ' * 300_000),
        completion(prompt=list(range(1_000_000))),
        completion(prompt=["x" * 4000] * 1024, logprobs=5, max_tokens=1),
        completion(prompt=[[1] * 1000] * 128, logprobs=20),
        completion(
            prompt=["x"] * 1024,
            response_format=as_format({"properties": {key: {"type": "string"} for key in "abcdefgh"}}),
        ),
    ):
        check_structure(body)
        plan_completion(body, {}, DEFAULTS)


def test_an_ordinary_echo_passes() -> None:
    plan = plan_completion(
        completion(prompt=["x" * 16_000] * 128, echo=True, logprobs=1, max_tokens=1), {}, DEFAULTS
    )
    assert plan.fit([[1] * 4000] * 128, 8192, 100) == [1] * 128


# ------------------------------------------------------------------------------------------------ what costs too much


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(n=128, response_format=as_format(nested(40))), "response_format"),  # 2 levels each
        (chat(response_format=as_format({"enum": list(range(33_000))})), "response_format"),
        (chat(response_format=as_format({"const": "x" * 600_000})), "response_format"),
        (chat(response_format=as_format({"x" * 600_000: 1})), "response_format"),
        (
            chat(response_format=as_format({"const": 2**63})).replace(b"9223372036854775808", b"9" * 30),
            "response_format",
        ),
        (
            chat(response_format=as_format({"minimum": 5, "minLength": 5, "maxLength": 5})).replace(
                b"5", b"5" * 4000
            ),
            "response_format",
        ),
        (b'{"messages": [{"content": "a"}]}', "messages[0].role"),
        (chat(tools=[tool("t", 1)] * 1025), "tools"),
        (chat(tools=[tool("t", 300)] * 60), "tools"),
        (chat(chat_template_kwargs={"x": [1] * 10_001}), "chat_template_kwargs"),
        (chat(stop="x" * 4097), "stop"),
        (chat(stop_token_ids=[1] * 1025), "stop_token_ids"),
        # what kills an engine of vLLM: its arrays have room for 1,024 biases, and 128 stops with the model's own
        (chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias"),
        (chat(stop_token_ids=list(range(101)), min_tokens=1), "stop_token_ids"),
        # what freezes an engine of vLLM while xgrammar reads it
        (chat(response_format=as_format(counting(201))), "response_format"),
        (chat(response_format=as_format({"allOf": [counting(150)] * 2})), "response_format"),
        (
            chat(tools=[{"type": "function", "function": {"name": "f", "parameters": counting(201)}}]),
            "tools",
        ),
        (chat(response_format=as_format({"pattern": "^(ab){1,1415}$"})), "response_format"),
        (chat(response_format=as_format({"pattern": "^" + "a?" * 1415 + "$"})), "response_format"),
        (chat(response_format=as_format({"pattern": "^((a?){40}){40}$"})), "response_format"),
        (
            chat(
                response_format=as_format(
                    {"properties": {f"p{i}": {"pattern": "^a{1,500}$"} for i in range(9)}}
                )
            ),
            "response_format",
        ),
        (chat(response_format=as_tag({"type": "regex", "pattern": "[a-z]{1,5000}"})), "response_format"),
        # 140 ranges of 18 digits on either end, and 17 ends of 309 digits
        (
            chat(response_format=as_format({"anyOf": [{"minimum": -(10**17), "maximum": 10**17}] * 140})),
            "response_format",
        ),
        (chat(response_format=as_format({"anyOf": [{"exclusiveMaximum": 1e308}] * 17})), "response_format"),
        (
            chat(response_format=as_format({"properties": {f"p{i}": {"maxLength": i} for i in range(41)}})),
            "response_format",
        ),
        # what freezes its core while the answer is generated
        (chat(response_format=as_format({"pattern": "^(a{1,101}){1,100}$"})), "response_format"),
        (
            chat(response_format=as_format({"patternProperties": {"((a?){9}b){999}((a{2}){3}){9999}": {}}})),
            "response_format",
        ),
        (chat(tools=[{"parameters": {"pattern": "((a{9}b){9}){999}"}}]), "tools"),
        (
            chat(response_format=as_tag({"type": "regex", "pattern": "((a{1,100}){1,100}){1,100}"})),
            "response_format",
        ),
        (
            chat(
                response_format=as_tag({"type": "grammar", "grammar": 'root ::= b{1,999}\nb ::= "a"{1,99}'})
            ),
            "response_format",
        ),
        (
            chat(
                response_format=as_tag(
                    {
                        "type": "repeat",
                        "min": 0,
                        "max": 999,
                        "content": {"type": "repeat", "min": 1, "max": 99},
                    }
                )
            ),
            "response_format",
        ),
        # numbers of any length, spaces and comments are counts, too
        (
            chat(response_format=as_format({"pattern": f"(a{{1,{99:030}}}){{1,{999:030}}}"})),
            "response_format",
        ),
        (grammar('root ::= (("a"{ 1, 99 }){1 , 999})'), "response_format"),
        (grammar('root ::= (("a"{1,\n99}){1,\t999})'), "response_format"),
        (grammar('root ::= (("a"{1 # up to\n,99}){1,999 # }\n})'), "response_format"),
        (grammar(f'root ::= ("a"{{1,{99:030}}}){{1,{999:030}}}'), "response_format"),
        # the product is no number that Python prints
        (grammar("root ::= a" + f"{{{10**17}}}" * 400), "response_format"),
        (chat(tools=[{"pattern": "(" * 200 + "a" + f"{{{10**17}}})" * 200}]), "tools"),
        # a form around another one repeats the other's text
        (
            chat(
                response_format=as_tag(
                    {
                        "type": "repeat",
                        "min": 1,
                        "max": 101,
                        "content": {"type": "regex", "pattern": "a{1,100}"},
                    }
                )
            ),
            "response_format",
        ),
        # classes that follow one another, of which each may end at any character
        (chat(response_format=as_format({"pattern": "^" + "." * 2000 + "$"})), "response_format"),
        (chat(response_format=as_format({"pattern": "^" + "[a-z]{1,9}" * 40 + "$"})), "response_format"),
        (
            chat(response_format=as_format({f"p{i}": {"pattern": "^.{1,20}x?.{1,20}$"} for i in range(20)})),
            "response_format",
        ),
        # what engines read by recursion, until their stack is full
        (chat(response_format=as_format({"pattern": "(" * 257 + "a" + ")" * 257})), "response_format"),
        (chat(response_format=as_format({"pattern": "(a)" * 9 + "(" * 50_000})), "response_format"),
        (chat(response_format=as_format(chained(2500))), "response_format"),
        (chat(tools=[{"type": "function", "function": {"name": "f", "parameters": chained(2500)}}]), "tools"),
        (chat(tools=[{"x": 1}]).replace(b'{"x":1}', b'{"x":NaN}'), "tools"),
        (chat(chat_template_kwargs={"x": 1}).replace(b'{"x":1}', b'{"x":1e999}'), "chat_template_kwargs"),
        (
            chat(response_format=as_format({"minimum": 1})).replace(b'"minimum":1', b'"minimum":-Infinity'),
            "response_format",
        ),
    ],
)
def test_what_a_chat_may_not_ask_for(body: bytes, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan_chat(body, {}, DEFAULTS)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("pattern", "product"),
    [
        ("", 1), ("a{5}", 1), ("a{5}b{7}", 1), ("(a{5}){7}", 35), ("(a{5}b{3}){7}", 35), ("((a{2})+c){1,3}", 6),
        ("(a{2,}){3}", 6), ("(a{1}){9}", 1), (r"(a\{5}){7}", 1), ("([{5}]){7}", 1), ("(a){2}{3}", 6), ("((", 1),
        ("))a{2}", 1), ("(a{5}|b){0,7}", 35), ("{5}{,3}", 1), ("((x{2}){3}y{50}){4}", 200), ("\\", 1), ("[", 1),
    ],
)  # fmt: skip
def test_repeats_inside_one_another(pattern: str, product: int) -> None:
    assert grammar_cost.repeats_of(pattern).nested == product


@pytest.mark.parametrize(
    ("pattern", "squares"),
    [
        ("", 0), ("abc", 0), ("a{5}", 25), ("a{1,5}b{7}", 25 + 49), ("a{5,}", 25), ("a{1}", 0), ("a{0,1}", 0),
        # the inner one as often as the outer one says: 7 x 25 + 49
        ("(a{5}){7}", 224), ("(a{5}b{3}){2}c", 2 * (25 + 9) + 4), ("(a{5}|(b{3}))", 34),
        # three optional parts; `+` counts, too, and so does a lazy repeat
        ("a?b*c+", 9), ("(a?b?){3}", 36 + 9), ("((a?){2}b*){3}", 81 + 3 * 4 + 9), ("[?*+]?", 1), (r"\?", 0),
        # what is read in another way
        ("a{1,99999}", 99_999**2), ("a{1,100000}", 0), ("b{3}a{2,999999}", 9),
        # groups that are never closed or opened
        ("(a{2}(b?", 5), ("a{2})b?", 5),
    ],
)  # fmt: skip
def test_squares_of_repeats(pattern: str, squares: int) -> None:
    assert grammar_cost.repeats_of(pattern).squares == squares


@pytest.mark.parametrize(("pattern", "product"), [("a", 1), ("a{5}", 35), ("(a{5}b{3}){2}c{20}", 140)])
def test_a_pattern_is_repeated_by_what_is_around_it(pattern: str, product: int) -> None:
    assert grammar_cost.repeats_of(pattern, 7).nested == product


@pytest.mark.parametrize("text", ["[", "[\\", "(", "{", "{1", "{1,", "\\"])
def test_no_character_of_a_pattern_or_grammar_is_looked_at_again_and_again(text: str) -> None:
    """The test would take an hour if some were."""
    long = text * (budget.MAX_SCHEMA_CHARS // len(text) - 10)
    assert grammar_cost.repeats_of(long).nested == 1
    assert budget.check_schema({"grammar": long}, "x") > 0


def test_a_text_around_a_repeat_keeps_it_apart_from_another_one() -> None:
    """A hundred texts of a hundred characters each are no repeats inside one another."""
    inner = {"type": "json_schema", "json_schema": {"type": "string", "pattern": "a{1,1000}"}}
    form = {"type": "repeat", "min": 1, "max": 100, "content": inner}
    plan_chat(chat(response_format=as_tag(form)), {}, DEFAULTS)


def test_options_count_for_each_sequence() -> None:
    """An engine gets them with each prompt, and reads a schema again for each choice of it."""
    # 10,000 values of 160 bytes and some 75,000 characters of 4: 1.9 MB
    large = as_format({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}})
    plan_chat(chat(response_format=large, n=16), {}, DEFAULTS)
    plan_completion(completion(prompt=["x"] * 16, response_format=large), {}, DEFAULTS)
    for body, plan in (
        (chat(response_format=large, n=128), plan_chat),
        (chat(tools=[tool("t", 60)] * 50, n=128), plan_chat),
        (completion(prompt=["x"] * 128, response_format=large), plan_completion),
        (completion(prompt=["x"] * 64, n=16, logit_bias={str(i): 1 for i in range(1000)}), plan_completion),
    ):
        with pytest.raises(ApiError, match="smaller options") as caught:
            plan(body, {}, DEFAULTS)
        assert (caught.value.status, caught.value.code) == (400, "request_too_costly")


def test_candidates_of_a_step() -> None:
    # 1024 prompts x 1 x (1 + 7) = 8192
    plan_completion(completion(prompt=["x"] * 1024, logprobs=7), {}, DEFAULTS)
    with pytest.raises(ApiError, match="is 9216; at most 8192"):
        plan_completion(completion(prompt=["x"] * 1024, logprobs=8), {}, DEFAULTS)


@pytest.mark.parametrize(
    ("prompt", "tokens", "n", "logprobs", "param"),
    [
        # 300,000 x 128 = 38,400,000 characters
        ("x" * 300_000, 10, 128, None, "echo"),
        # ids count 4 characters each: 66,000 x 4 x 128 = 33,792,000
        ([1] * 66_000, 66_000, 128, None, "echo"),
        # 200,000 x 21 = 4,200,000 candidates
        ("x", 200_000, 1, 20, "logprobs"),
    ],
)
def test_an_echo_that_costs_too_much(
    prompt: Any, tokens: int, n: int, logprobs: int | None, param: str
) -> None:
    plan = plan_completion(completion(prompt=prompt, echo=True, n=n, logprobs=logprobs), {}, DEFAULTS)
    with pytest.raises(ApiError) as caught:
        plan.fit([[1] * tokens], 1_000_000, 100)
    assert (caught.value.param, caught.value.code) == (param, "request_too_costly")


# ------------------------------------------------------------------------------------------------------- structure

TOO_MANY = [
    b'{"prompt":"a","x":[' + b"[]," * structure.MAX_OBJECTS + b"1]}",
    b'{"prompt":"a","x":[' + b"{}," * structure.MAX_OBJECTS + b"1]}",
    b'{"prompt":"a","x":{' + b'"a":1,' * structure.MAX_NAMES + b'"a":1}}',
    b'{"prompt":"a","x":[' + b'"",' * structure.MAX_STRINGS + b"1]}",
    b'{"prompt":[' + b"1," * (structure.MAX_VALUES + 1) + b"1]}",
]


@pytest.mark.parametrize("body", TOO_MANY, ids=["lists", "objects", "names", "strings", "values"])
def test_too_many_parts_are_refused_before_they_are_parsed(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        check_structure(body)
    assert caught.value.code == "body_too_complex"


@pytest.mark.parametrize("piece", [b"{[", b"a: b, ", rb"\"{", rb"\\\"[{", rb"\n{"])
def test_text_is_no_structure_however_it_looks(piece: bytes) -> None:
    check_structure(b'{"prompt":"' + piece * structure.MAX_VALUES + b'"}')


def test_a_quote_behind_escaped_backslashes_ends_the_text() -> None:
    """The text ends at the second quote, so what follows is structure."""
    with pytest.raises(ApiError):
        check_structure(b'{"prompt":"' + b"\\\\" * 3 + b'","x":[' + b"[]," * structure.MAX_OBJECTS + b"1]}")


def with_arguments(*arguments: str) -> ChatRequest:
    """Returns a conversation in which each of these texts is the arguments of a call."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": one}} for one in arguments]
    body = chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]} for call in calls])
    # they are texts in the body
    check_structure(body)
    request = plan_chat(body, {}, DEFAULTS).request
    assert request is not None
    return request


@pytest.mark.parametrize("times", [1, 2], ids=["one call", "two calls"])
def test_arguments_of_calls_have_no_more_parts_than_a_body(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    parts = structure.MAX_OBJECTS // times
    request = with_arguments(*["[" + "[]," * parts + "1]"] * times)

    def parsed(text: str) -> Any:
        raise AssertionError("the arguments are parsed before they are looked at")

    monkeypatch.setattr(conversation.orjson, "loads", parsed)
    with pytest.raises(ApiError, match="arguments") as caught:
        messages_for_template(request)
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        400, "body_too_complex", "messages",
    )  # fmt: skip


def test_long_arguments_of_few_parts_pass() -> None:
    text = orjson.dumps({"file": "{[" * structure.MAX_OBJECTS}).decode()
    (message,) = messages_for_template(with_arguments(text))
    assert message["tool_calls"][0]["function"]["arguments"] == orjson.loads(text)


def test_depth_is_counted_in_levels_of_json() -> None:
    budget.check_schema({"a": [[]]}, "x")
    # {"type", "json_schema": {"schema": ...}} has 3 levels, each of `nested` has 2, and the last has 2
    plan_chat(chat(response_format=as_format(nested(29))), {}, DEFAULTS)
    with pytest.raises(ApiError, match="levels"):
        plan_chat(chat(response_format=as_format(nested(31))), {}, DEFAULTS)
