"""What the cluster looks like: events in (`events`), one reducer (`reducer`), frozen views out (`views`)."""
