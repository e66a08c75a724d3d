"""Keys and signals of a prompt's text."""

from predictors.text import TEMPLATE_CHARS, prompt_key, signals, template_key


def test_equal_prompts_meet_whatever_their_white_space_and_case():
    assert prompt_key("Hello,\n  World ") == prompt_key("hello, world")
    assert prompt_key("hello, world") != prompt_key("hello, word")


def test_one_template_filled_twice_meets():
    head = "Summarise order 123 for the customer in a friendly tone. " + "x" * TEMPLATE_CHARS
    other = head.replace("123", "98765")[:190] + head[190:]
    assert template_key(head) == template_key(head + " tail")
    assert template_key("order 1") == template_key("order 2")
    assert template_key(head) != template_key("Translate: " + other)


def test_a_salt_hides_guesses_and_odd_text_is_taken():
    assert prompt_key("a", b"secret") != prompt_key("a")
    assert len(prompt_key("\ud800 lone surrogate")) == 32


def test_signals():
    made = signals("system text", "Write 300 words?\n- a\n- b\n1. c\n```py\ndef f():\n```")
    assert made.chars == 11
    assert made.requested_words == 300
    assert made.question_marks == 1
    assert made.list_marks == 3
    assert made.code_marks >= 3
    assert signals("plain").requested_words is None
