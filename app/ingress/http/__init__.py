"""HTTP/1.1 in and out: the listener, the protocol on httptools, and the ways back to a client."""
