"""What hostile clients do to the streams of others, and to the memory and CPU of the ingress."""
