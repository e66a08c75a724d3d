"""Tokenisers and chat templates: Hugging Face's semantics, on a tokenizer directory built here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from app.ingress.tokenizer import HfCodec, TemplateError, WordCodec

WORDS = ["<unk>", "<s>", "</s>", "hello", "world", "user", "assistant", ":", "<|im_end|>"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A word-level tokenizer that puts <s> in front, its configuration, and a model of 16 padded embeddings."""
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>"), AddedToken("<|im_end|>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None})
    )
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 16}))
    return tmp_path


def codec(directory: Path, template: str | None) -> HfCodec:
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return HfCodec(directory)


def render(made: HfCodec, messages: list[dict[str, Any]] | None = None, **more: Any) -> str:
    options: dict[str, Any] = {"tools": None, "add_generation_prompt": True, "continue_final_message": False}
    given = {key: more.pop(key) for key in list(more) if key in options}
    merged = options | given
    return made.render_chat(
        messages or [{"role": "user", "content": "hello"}],
        merged["tools"],
        merged["add_generation_prompt"],
        merged["continue_final_message"],
        more,
    )


def test_encode_and_decode(directory: Path) -> None:
    made = codec(directory, None)
    assert made.encode("hello world", True) == [1, 3, 4]
    assert made.encode("hello world", False) == [3, 4]
    assert made.encode("hello<|im_end|>", False) == [3, 8]
    assert made.decode([3, 4, 2]) == "hello world </s>"
    # The model's vocabulary is padded; the tokenizer has 9.
    assert made.vocab_size == 16


def test_a_template_sees_messages_special_tokens_and_options(directory: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}{{ mood }}"
    )
    made = codec(directory, template)
    assert render(made) == "<s>user: hello</s>assistant:"
    assert render(made, add_generation_prompt=False, mood="!") == "<s>user: hello</s>!"


def test_blocks_are_trimmed_as_hugging_face_does(directory: Path) -> None:
    template = "{% for m in messages %}\n    {% if true %}\nx{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert render(codec(directory, template)) == "xhello\n"


def test_loop_controls_json_and_the_generation_tag(directory: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}|"
        "{{ tools | tojson }}|{% generation %}g{{ messages | length }}{% endgeneration %}"
    )
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "b"}]
    tools = [{"name": "f<", "é": 1}]
    assert render(codec(directory, template), messages, tools=tools) == '<é>|[{"name": "f<", "é": 1}]|g2'


def test_strftime_now_gives_the_date(directory: Path) -> None:
    assert render(codec(directory, "{{ strftime_now('%Y') | length }}")) == "4"


def test_a_template_that_refuses_says_so(directory: Path) -> None:
    made = codec(directory, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        render(made)


def test_a_value_that_is_nested_too_deeply_for_a_template_is_refused(directory: Path) -> None:
    made = codec(directory, "{{ messages[0].content | tojson }}")
    value: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        value = [value]
    with pytest.raises(TemplateError, match="nested too deeply"):
        render(made, [{"role": "user", "content": value}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__bases__[0].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(directory: Path, template: str) -> None:
    with pytest.raises(TemplateError):
        render(codec(directory, template))


def test_without_a_template_chat_is_refused(directory: Path) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        render(codec(directory, None))


def test_the_template_may_stand_in_the_configuration(directory: Path) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": "one"}))
    assert render(HfCodec(directory)) == "one"
    path.write_text(
        json.dumps(
            {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
        )
    )
    assert render(HfCodec(directory)) == "d"
    (directory / "chat_template.jinja").write_text("file")
    assert render(HfCodec(directory)) == "file"


def test_continue_final_message_cuts_behind_the_last_content(directory: Path) -> None:
    made = codec(directory, "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}")
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world "}]
    text = render(made, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "user: hello</s>assistant: world"


def test_what_is_missing_or_broken_is_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        HfCodec(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="does not compile"):
        codec(directory, "{% if %}")


def test_words_are_tokens_for_the_sim_model() -> None:
    made = WordCodec(100)
    ids = made.encode("one two  three", True)
    assert len(ids) == 3
    assert ids == made.encode("one two  three", False)
    assert all(0 <= token < 100 for token in ids)
    assert made.encode("one", True) != made.encode("two", True)
    assert made.encode("   ", True) != []
    messages = [{"role": "user", "content": "hi"}]
    assert made.render_chat(messages, None, True, False, {}) == "<user> hi\n<assistant>"
