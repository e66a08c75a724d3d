"""The effect of hostile clients on the streams of others, and on the memory and CPU of the ingress."""
