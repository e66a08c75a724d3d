"""NetKV (III-V) chooses the decode worker of least transfer, queue and first step."""
