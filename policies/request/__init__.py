"""The life of one request, without I/O: its stages, and the state machine that the ingress and the simulator drive."""
