"""BR-H, NetKV and request classes in one objective, in request-seconds; and the static stack it is compared with."""
