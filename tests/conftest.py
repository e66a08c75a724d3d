"""Settings that every test shares."""

import os

# Ray keeps to loopback and sends no usage statistics; both are read when ray is imported, so they are set first.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# Tests need no network: a model that is not on this machine is an error, not a download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
