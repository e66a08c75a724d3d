"""A deterministic discrete-event simulator of a prefill/decode cluster; drives the live router's own policies."""
