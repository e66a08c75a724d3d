"""Writes a what-if file from a running application: its fleet, policies, network, timing, and latest requests.

    sluice simulate --from-live http://127.0.0.1:8000 --write mine/

asks the application for some seconds (`ask`), takes its latest requests from the journal (`requests`), and writes
`base.yaml`, `workload.jsonl` and `measured.json` into the folder (`describe`). The simulation of this base stands
beside what was measured of the same requests (`trust`).
"""
