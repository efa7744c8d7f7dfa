"""Drawings of meshes, routes and schedules, as text and as SVG.

`routes_panel`, `phase_panel` and `schedule_panels` say what to draw; `draw_text` and `draw_svg`
draw it. `figure` returns the figures of the paper.
"""

from ftmesh.draw.panel import Arrow as Arrow
from ftmesh.draw.panel import Panel as Panel
from ftmesh.draw.panel import figure as figure
from ftmesh.draw.panel import phase_panel as phase_panel
from ftmesh.draw.panel import routes_panel as routes_panel
from ftmesh.draw.panel import schedule_panels as schedule_panels
from ftmesh.draw.svg import draw_svg as draw_svg
from ftmesh.draw.text import draw_text as draw_text
