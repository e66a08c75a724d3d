"""The hot path between ingress, router and engines: msgspec messages over framed sockets."""
