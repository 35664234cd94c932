"""The demo: a short serving benchmark of LRU and EvicPress, told in a table, bars and a page."""
