"""Many concurrent streams on sim engines: what one takes in the ingress, and how many there may be at a small step."""
