"""The weights of an engine before a loader needs them: read ahead from disk, or from an engine that has them."""
