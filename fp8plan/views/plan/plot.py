"""The file of a plan's pictures: .png or .html, as its name says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fp8plan.errors import ConfigError
from fp8plan.model.emit.settings import check_kv_scales
from fp8plan.views.plan.page import write_page
from fp8plan.views.plan.png import write_png

if TYPE_CHECKING:
    from fp8plan.model.plan.planner import Prediction


def plot(prediction: Prediction, path: str | Path, kv_scales: str = "unit") -> None:
    """Write the picture: .png by matplotlib, .html by plotly with the plan's tables, reasons and settings.

    kv_scales: for the settings on the page, as in `emit`

    Raises ConfigError for another suffix, a file that cannot be written, or a plotting package that is not installed.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise ConfigError(f"cannot plot to {target}: there is no folder {target.parent}")
    try:
        draw(prediction, target, kv_scales)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot write {target}: {reason}; give a file that can be written") from None


def check_suffix(target: Path) -> None:
    """Raise ConfigError for a name that ends neither in .png nor in .html."""
    if target.suffix not in (".png", ".html"):
        raise ConfigError(f"cannot plot to {target}; allowed: a name that ends in .png or .html")


def draw(prediction: Prediction, target: Path, kv_scales: str = "unit") -> None:
    """`plot`, but a file that cannot be written is an OSError: it may be a draft, whose name nobody should read."""
    check_suffix(target)
    check_kv_scales(kv_scales)
    try:
        if target.suffix == ".png":
            write_png(prediction, target)
        else:
            write_page(prediction, target, kv_scales)
    except ImportError as error:
        raise ConfigError(f"plotting needs {error.name}; type: pip install 'fp8plan[report]'") from None
