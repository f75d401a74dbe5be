"""Figures of a folder by their name."""

from evictbench.plot.drawings import drawings
from evictbench.plot.request import PlotRequest
from evictbench.store.select import Filters


def drawn_figures(folder, names=None, where=(), each_protocol=True, **changes):
    """The drawings, by the figure's name. One that was asked for is drawn too, so that what cannot be drawn fails."""
    request = PlotRequest(folder, filters=Filters(where=tuple(where)), each_protocol=each_protocol, **changes)
    found = {
        drawing.name.partition("-")[0]: drawing
        for drawing in drawings(request, None if names is None else [names], lambda sentence: None)
    }
    if names is not None:
        found[names].figure()
    return found
