"""The simple policies are baselines and the usual load- and cache-aware choices."""
