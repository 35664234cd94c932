"""The serving benchmark: every system as a real server in turn, under the same requests and sizes of memory."""
