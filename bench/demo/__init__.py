"""The demo: a short serving benchmark of LRU and EvicPress, told in a table, a chart and a page."""
