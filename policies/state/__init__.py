"""The cluster's state: events in (`events`), one reducer (`reducer`), frozen views out (`views`)."""
