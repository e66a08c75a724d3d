"""The mark of tests that draw the dashboard's page in a browser (`benchmarks.watching.chromium`)."""

import pytest

from benchmarks.watching.chromium import CHROMIUM

WITHOUT = "there is no chromium here, so the dashboard's page is not drawn: `make setup-browser` installs it"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)
