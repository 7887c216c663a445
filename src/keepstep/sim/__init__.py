"""The control plane in a world made from one seed: see docs/internals/simulation.md.

A room knows only those below it; `lint-imports` checks it, and no two files know each other.

    many            many worlds in a pool of processes, and what they add up to
    run             one world, from its plan to its result
    play            telling the story of a world: start, disturb, heal, judge
    faults, rules   what can go wrong with whom; what must hold whatever does
    world           nodes, orchestrator and scheduler put together, and what is known of them
    rank            a worker process, from its threads to its part in a recovery
    ground          time, network, groups, memory, disk; what a part sees of its surroundings
    plans           what a world is like and what goes wrong in it, drawn from its seed
    units           nanoseconds

Where two parts meet, the lower one says as a Protocol what it needs of the other
(`ground/surroundings.py`). What happens is told by name to `Rules`, which the world is given by
whoever plays it; what is known by then stands in the world's `Book`.
"""
