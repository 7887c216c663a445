"""What the parts of a world stand on: time, network, process groups, memory, disk, numbers.

`world_view.py` says what a part sees of the world around it.
"""
