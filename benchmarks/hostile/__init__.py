"""The effect of hostile clients on the streams of others, and to the memory and CPU of the ingress."""
