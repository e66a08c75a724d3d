"""The connections between ingress, router and engines: msgspec messages over framed sockets."""
