"""The plots of `headrace weights inspect --html`, as one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from plotly import graph_objects
from plotly.subplots import make_subplots

from headrace.sync.delta_summary import Summary

_COLOUR = "#0e7c86"


def write_page(found: Summary, path: Path, *, title: str) -> None:
    """Density per layer, and sizes of steps. Raises OSError."""
    figure = make_subplots(
        rows=2,
        cols=1,
        row_heights=[0.65, 0.35],
        subplot_titles=("changed weights per layer, %", "changes by steps of the last place (at least)"),
    )
    layers = [row.layer for row in found.layers]
    density = [100 * row.density_frac for row in found.layers]
    figure.add_trace(graph_objects.Bar(x=layers, y=density, marker_color=_COLOUR, name="density"), row=1, col=1)
    steps = [str(2**i) for i, _ in enumerate(found.steps)]
    figure.add_trace(graph_objects.Bar(x=steps, y=found.steps, marker_color=_COLOUR, name="changes"), row=2, col=1)
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="log", row=2, col=1)
    about = f"{title}: {found.ratio:.4g}x smaller, {100 * found.density_frac:.3g} % of the weights changed"
    figure.update_layout(title=about, showlegend=False, template="plotly_white", height=900)
    path.write_text(figure.to_html(include_plotlyjs=True), encoding="utf-8")
