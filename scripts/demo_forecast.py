"""Write statsmodels' yearly sunspot numbers as a table: `make demo-forecast` forecasts them.

python scripts/demo_forecast.py demo/sunspots.csv
"""

from __future__ import annotations

import sys

from statsmodels.datasets import sunspots


def main() -> None:
    """Write the table to the path that is given."""
    sunspots.load_pandas().data.to_csv(sys.argv[1], index=False)


if __name__ == "__main__":
    main()
