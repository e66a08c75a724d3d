"""Many requests at once with the asynchronous client: `python examples/async_client.py`."""

import asyncio

from sluice import AsyncSluice, RateLimitedError, SluiceError

CITIES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Quito", "Hanoi", "Accra")


async def ask(client: AsyncSluice, city: str) -> str:
    """A sentence about `city`, or why there is none. The client has retried a full server already."""
    try:
        answer = await client.chat(f"Say one thing about {city}.", max_tokens=16, priority="batch")
    except RateLimitedError as error:
        return f"(the server is full: {error})"
    except SluiceError as error:
        return f"(failed: {error})"
    return answer.text.strip()


async def main() -> None:
    async with AsyncSluice() as client:
        answers = await asyncio.gather(*(ask(client, city) for city in CITIES))
    for city, answer in zip(CITIES, answers, strict=True):
        print(f"{city}: {answer}")


asyncio.run(main())
