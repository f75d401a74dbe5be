"""A cache of fixed slots: the heads of a layer keep equally many entries."""
