"""The colours of positions, shared by every picture: the beginning of the text at one end, its end at the other."""

from __future__ import annotations

# As in the paper's Figure 4: blue to red through light grey, readable on white and on black.
BLUE_RED = ["#3b4cc0", "#6788ee", "#9abbff", "#c9d7f0", "#edd1c2", "#f7a889", "#e26952", "#b40426"]
# Matplotlib's cividis: dark blue to yellow, rising evenly in lightness, the same to the colour-blind.
BLUE_YELLOW = ["#00224e", "#213b6e", "#4c556c", "#6c6e72", "#8f8a78", "#b1a570", "#d7c461", "#fee838"]
