"""The ingress: the HTTP listener, the requests' life cycles, and the links to the router and the engines."""
