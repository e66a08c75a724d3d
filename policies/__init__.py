"""Pure decisions over frozen snapshots. Nothing here knows Ray, vLLM, asyncio or a clock (docs/design.md 1)."""
