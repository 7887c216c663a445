"""The protocol of one rank: what a worker says to its agent, what it waits for, in which order.

    inbox       what has come from the agent: answered again, dropped as stale, done at once, or
                kept until the main thread asks for it
    asks        what the protocol asks of whoever drives it
    staging     groups of the next generation, which are built beside the old ones
    recovering  a process that has a rank: interrupted, holding, swapped, at the end of its script
    joining     a parked process that is given a rank: assigned, arrived, ready, copied

Nothing here waits, or touches the state of a rank. `recovering` and `joining` are generators: they
yield what they ask for and are sent the answer. The worker answers by blocking, the simulator by
events, unit tests at once. All three drive this code, so what the simulator proves is what runs.
"""
