"""NetKV III-V: the decode worker of least transfer, queue and first step."""
