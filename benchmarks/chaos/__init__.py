"""Failures on purpose: an application under load whose processes are killed, stopped, slowed and starved by a seed."""
