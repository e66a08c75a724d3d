"""`sluice profile` measures deployed engines through the public API and writes the figures that policies read."""
