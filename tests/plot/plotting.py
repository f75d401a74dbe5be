"""Figures of a folder, drawn and by their name."""

from evictbench.plot.drawings import drawings
from evictbench.plot.request import PlotRequest
from evictbench.store.select import Filters


def drawn_figures(folder, names=None, where=(), each_protocol=True, **changes):
    """The drawings, by the figure's name; each is drawn once, so that what cannot be fails."""
    request = PlotRequest(folder, filters=Filters(where=tuple(where)), each_protocol=each_protocol, **changes)
    found = {
        drawing.name.partition("-")[0]: drawing
        for drawing in drawings(request, None if names is None else [names], lambda sentence: None)
    }
    for drawing in found.values():
        drawing.figure()
    return found
