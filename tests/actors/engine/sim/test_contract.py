"""The sim engine keeps the contract of all engines."""

from actors.engine.protocol import Engine
from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from tests.actors.engine.contract import EngineContract

SLOW = {"prefill_base_s": 0.4, "decode_base_s": 0.02}


class TestSimContract(EngineContract):
    """`EngineContract` on the sim engine."""

    def make(
        self,
        role: str,
        name: str,
        *,
        slots: int = 8,
        lease_s: float = 30.0,
        max_lease_s: float = 600.0,
        hold_transfers_s: float = 0.0,
        slow: bool = False,
    ) -> Engine:
        return SimEngine(
            SimEngineConfig(
                name,
                role,  # type: ignore[arg-type]
                slots=slots,
                kv_blocks=1024,
                lease_s=lease_s,
                max_lease_s=max_lease_s,
                hold_transfers_s=hold_transfers_s,
                timing=SLOW if slow else {},
            )
        )
