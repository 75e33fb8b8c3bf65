"""Write every dashboard into a folder. Other JSON files in it are deleted.

python -m tools.dashboards deploy/helm/files/dashboards
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tools.dashboards import DASHBOARDS
from tools.dashboards.grafana import render_dashboard


def main() -> None:
    """Write the dashboards into the folder given on the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.json"):
        stale.unlink()
    for name, dashboard in DASHBOARDS.items():
        text = json.dumps(render_dashboard(dashboard), indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
