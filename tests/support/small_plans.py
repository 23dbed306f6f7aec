"""Plans of small images."""

from lowtide.memory.ledger import LedgerRow
from lowtide.memory.plan import Plan

MIB = 1 << 20


def a_plan(width: int = 100, device_bytes: int = 50 * MIB, **changes) -> Plan:
    values = dict(
        strategy="tiled",
        accuracy="exact",
        device="cpu",
        precision="fp32",
        channels_last=False,
        width=width,
        height=80,
        padded_width=width,
        padded_height=80,
        scale=2,
        align=1,
        tile_width=64,
        tile_height=64,
        overlap=14,
        blend=0,
        batch=1,
        tiles=4,
        images_per_tile=1,
        run_pixels=4096,
        seam_share=0.0,
        seconds=1.0,
        model_sha256="abc",
        ledger=[
            LedgerRow(
                name="weights",
                place="device",
                value=device_bytes,
                upper=device_bytes,
                origin="known",
            )
        ],
    )
    return Plan.model_validate({**values, **changes})
