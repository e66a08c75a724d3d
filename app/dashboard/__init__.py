"""The dashboard: a page to watch a running application and to experiment with it."""
