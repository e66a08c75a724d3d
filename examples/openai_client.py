"""The official `openai` package against Sluice: `python examples/openai_client.py`."""

import os

from openai import OpenAI

url = os.environ.get("SLUICE_BASE_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("SLUICE_API_KEY", "none"))
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_tokens=40,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    # Sluice's own fields travel in `extra_body`; "interactive" needs an API key that allows it.
    extra_body={"priority": "standard", "slo": {"ttft_ms": 500}},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n{chunk.usage.completion_tokens} tokens")
