"""Flow scheduling: which KV transfer may use a port next. Pure: flows, ports and times in, permits out (MFS 3-5)."""
