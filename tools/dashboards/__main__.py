"""Write every dashboard into a folder; other JSON files there are deleted.

python -m tools.dashboards deploy/helm/files/dashboards
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tools.dashboards import DASHBOARDS
from tools.dashboards.grafana import as_grafana


def main() -> None:
    """Write them into the folder that the command line names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.json"):
        stale.unlink()
    for name, dashboard in DASHBOARDS.items():
        text = json.dumps(as_grafana(dashboard), indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
