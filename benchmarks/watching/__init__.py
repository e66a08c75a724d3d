"""Measures what it costs to watch an application: its dashboard, open pages, and traces."""
