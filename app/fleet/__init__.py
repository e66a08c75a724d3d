"""The fleet as any process sees it that the router reports to: figures, states, and questions to the router."""
