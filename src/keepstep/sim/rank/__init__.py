"""A simulated worker, from the process of an operating system (`process.py`) to a rank (`rank.py`).

Each file is a floor that knows only those below it:

    rank      is given a rank, comes to be it, takes part
    member    its part in a recovery
    stepper   its transactions
    witness   what its witness finds in a fence
    shards    state that no other rank has
    saver     periodic checkpoints
    grouped   how it meets others
    worker    inbox, page, and the protocol of core/rank that it is in
    process   threads and timers; what a fault does to any process
"""
