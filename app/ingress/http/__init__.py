"""The HTTP/1.1 side of the ingress: the listener, the protocol on httptools, and the replies to clients."""
