"""Hostile input by a seed: HTTP bytes and JSON bodies to an ingress, to one with a key file and to the dashboard, wire
frames, the flow agent's socket, KV events, configurations and key files.

    python -m tests.fuzz --requests 1000000 --frames 1000000    (make fuzz)

Each part draws its cases from one random generator, so a seed and a number give the same case again. `corpus` has what
cases are made of, `mutate` changes it, and each other module drives one target and says what a finding is.
"""
