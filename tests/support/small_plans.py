"""Plans of small images."""

from lowtide.memory.plan import LedgerRow, Plan

MIB = 1 << 20


def a_plan(
    width: int = 100, device_bytes: int = 50 * MIB, overlap: int = 14, tiles: int = 4, **changes
) -> Plan:
    values = dict(
        strategy=dict(
            name="tiled",
            tile_width=64,
            tile_height=64,
            overlap=overlap,
            blend=0,
            tiles=tiles,
            run_pixels=4096,
        ),
        image=dict(
            width=width,
            height=80,
            padded_width=width,
            padded_height=80,
            scale=2,
            align=1,
            network_inputs=1,
        ),
        accuracy="exact",
        device="cpu",
        precision="fp32",
        channels_last=False,
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
