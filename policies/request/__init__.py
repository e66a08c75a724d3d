"""The life of one request, pure: its stages, and the state machine that the ingress and the simulator both drive."""
