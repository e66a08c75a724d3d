"""One answer with the SDK: `python examples/chat.py`."""

from sluice import SLO, Sluice

with Sluice() as client:
    answer = client.chat(
        [
            {"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
        max_tokens=40,
        temperature=0,
        # Sluice's own fields: which requests come first ("interactive" needs an API key that allows it), and which
        # latency this one should see.
        priority="standard",
        slo=SLO(ttft_ms=500),
        session="example",
    )
    print(answer.text)
    if answer.usage is not None:
        print(f"{answer.usage.prompt_tokens} prompt tokens, {answer.usage.completion_tokens} generated")

    status = client.status()
    print("engines:", ", ".join(f"{engine.id} ({engine.role})" for engine in status.engines))
