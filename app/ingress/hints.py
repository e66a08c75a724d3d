"""What an ingress tells the router's predictors of a request: sampling, keyed digests, and signals of the text.

Never the text itself, nor the user's name. The digests are keyed (by the wire's secret where there is one), so a log of
them does not reveal a prompt or a name to somebody who can guess it but lacks the key.
"""

from actors.router.forecasts import Hints, encode_hints
from app.ingress.job_parts import Work
from predictors.text import digest, prompt_key, signals, template_key


def hints_of(work: Work, model: str, salt: bytes) -> bytes:
    """`Submit.hints` of a request."""
    params, text = work.params, work.text
    found = None
    if text is not None:
        s = signals(text)
        found = (s.chars, s.last_turn_chars, s.question_marks, s.code_marks, s.list_marks, s.requested_words)
    return encode_hints(
        Hints(
            model=model,
            temperature=params.get("temperature"),
            top_p=params.get("top_p"),
            top_k=params.get("top_k"),
            stop_strings=len(params.get("stop") or ()),
            structured_output=params.get("response_format") is not None,
            prompt_key=None if text is None else prompt_key(text, salt),
            template_key=None if text is None else template_key(text, salt),
            text=found,
            user=digest(work.user, salt) if work.user else None,
        )
    )
