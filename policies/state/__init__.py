"""The cluster's state: one reducer (`reducer`) takes events (`events`) and gives frozen views (`views`)."""
