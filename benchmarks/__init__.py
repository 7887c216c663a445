"""What Keepstep costs and what it saves, measured on the machine at hand.

    python -m benchmarks [overhead|pause|restart|memory|all] [--quick]

Every figure is a comparison made inside one run, and every result file says on which machine, with
which versions, by which command and when it was made.
"""
