"""API keys, what each may use, and what each has used. All of it is off unless a key file is configured."""
