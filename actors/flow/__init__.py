"""Flow scheduling, live: agents permit the chunks of KV reads (`agent`), and workers read by permit (`reader`)."""
