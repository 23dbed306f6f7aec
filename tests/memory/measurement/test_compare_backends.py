"""The table of two ledgers."""

from lowtide.core.units import MIB
from lowtide.memory.ledger import LedgerRow
from lowtide.memory.measurement.ledger_diff import compare_ledgers


def row(name: str, value: int, upper: int | None = None) -> LedgerRow:
    return LedgerRow(
        name=name,
        place="device",
        value=value,
        upper=value if upper is None else upper,
        origin="known",
    )


def test_the_table_of_two_ledgers():
    predicted = [row("weights", 2 * MIB), row("workspace", MIB, 2 * MIB), row("weights", MIB)]
    assert compare_ledgers(
        predicted, [row("weights", 3 * MIB), row("context", 3 * MIB)]
    ).splitlines() == [
        "           predicted   at most  measured",
        "weights     3.00 MiB  3.00 MiB  3.00 MiB",
        "workspace   1.00 MiB  2.00 MiB         –",
        "context            –         –  3.00 MiB",
        "total       4.00 MiB  5.00 MiB  6.00 MiB",
        "measured / predicted 1.500, over the bound by 1.00 MiB",
    ]
    assert compare_ledgers(predicted, [row("weights", MIB)]).endswith("0.250, within the bound")
    assert compare_ledgers([], []).endswith("\nwithin the bound")
