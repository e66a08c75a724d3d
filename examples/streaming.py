"""An answer word by word, with the time to its first token: `python examples/streaming.py`."""

import time

from sluice import Sluice

with Sluice() as client:
    sent_s = time.perf_counter()
    first_s = None
    with client.chat("Tell me about the sea.", max_tokens=60, stream=True) as stream:
        for chunk in stream:
            if chunk.text and first_s is None:
                first_s = time.perf_counter() - sent_s
            print(chunk.text, end="", flush=True)
    print()
    if first_s is not None:
        print(f"first token after {first_s * 1000:.0f} ms, all after {time.perf_counter() - sent_s:.2f} s")
