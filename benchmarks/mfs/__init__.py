"""KV reads by deadline on a real link: vLLM engines on two hosts, whose reads are unscheduled, by EDF or by MFS.

    prefill host                        decode host
    one engine, prompts cached          two engines, caches off
                                        flow agent, which orders all reads
         |                                   |
         +---- veth, shaped by tc tbf -------+

The hosts are network namespaces (`benchmarks.hosts`), and UCX is held to TCP on their devices, because it would pass
the link by in shared memory. Prompts are cached on the prefill engine, so a prefill costs one short step, and the
requests contend for the network alone. Requests arrive as a Poisson process. Tight ones have short prompts and loose
ones long prompts; each class must have its first token within a multiple of what it takes alone.

    python -m benchmarks.mfs                 (make bench-mfs)
    python -m benchmarks.mfs --setup sim     (the flows of all three stages, on 16 sim engines with one hot sender;
                                             a class is promised a multiple of what its slowest way takes alone)

Modules: `workload` (which requests arrive when), `link` (hosts and cable), `engines` (processes on them), `drive` (the
client), `reports` (what the flow agent says), `report` (figures, table and plot), `__main__` (the command).
"""
