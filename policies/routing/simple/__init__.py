"""Policies that need no paper of their own: baselines and the usual load- and cache-aware choices."""
